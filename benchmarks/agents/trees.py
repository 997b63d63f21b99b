"""Random conversation trees: do the recorded tokens of agents have the probabilities that a slow oracle computes?

    python benchmarks/agents/trees.py --trees 2000 --out results/agent_trees.json
    python benchmarks/agents/trees.py --trees 200 --dtype float32 --out results/agent_trees_float32.json
    python benchmarks/agents/trees.py --summary results/agent_trees.json results/agent_trees_float32.json

Each tree is an agent that calls the tiny shipped policy in a random order of turns, tools, branches, retries,
cancellations, side calls, concurrent calls and rewritten histories, while new weights are published. Checked are:

| what | how |
|---|---|
| log-probabilities | each reply is computed again, token by token, with the weights of its versions |
| rows | each reply that the agent has read trains exactly once, side calls and abandoned replies never |
| contexts | the tokens before a reply spell the messages that the agent sent |
| versions | none older than the weights when the call began, none newer than the newest |
| drift | no call that continues a conversation begins it anew |

Resumable: trees are numbered by their seeds, and those in the file are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import functools
import json
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.common.measurement import ROOT, measurement, write_measurement
from lit_async_rl.agents.calculator_agent import ADD, CalculatorParser
from lit_async_rl.agents.calls import AgentCallError, Reply
from lit_async_rl.agents.engine import AgentEngine
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.agents.rows import rows_of
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.files import replacing
from lit_async_rl.types import Completion

MODEL = asset("calculator_policy")
TEMPLATE = asset("calculator_chat.jinja")
TOLERANCES = {"float64": 2e-6, "float32": 5e-5}  # absolute and relative, by the precision of the engine
GOAL = 1e-5  # nats, of float32
SUMS = {
    "num_calls": "calls",
    "num_rows": "rows",
    "num_tokens": "tokens that train",
    "num_older": "tokens older than their call",
    "drift": "drift",
}
ACTIONS = (
    ("turn", 5),
    ("tool", 4),
    ("branch", 3),
    ("many", 1),
    ("retry", 2),
    ("retry_cancelled", 2),
    ("abandon", 2),
    ("side", 1),
    ("sub_agent", 1),
    ("together", 1),
    ("rewritten", 2),
    ("text", 2),
)


@dataclass
class Read:
    """A reply that the agent has read, and the text that it should follow; None where the history was rewritten."""

    reply: Reply
    before: str | None
    trains: bool = True


@dataclass
class Tree:
    """The agent of one random tree; it notes what it has read.

    Args:
        seed: of its choices.
        num_actions: calls, about.
        newest: gives the version of the weights that the engine has.
    """

    seed: int
    num_actions: int = 10
    read: list[Read] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    episode: AgentEpisode | None = None
    newest: Callable[[], int] = int
    num_older: int = 0
    begun: dict[str, int] = field(default_factory=dict)

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        self.episode = client.episode
        self.read = []
        self.done = Counter()
        self.num_older = 0
        self.begun = {}
        chance = random.Random(self.seed)
        tools = chance.choice(([ADD], None))
        first = [{"role": "user", "content": prompt.text}]
        if chance.random() < 0.5:
            first = [{"role": "system", "content": "sum"}, *first]
        self.conversations: list[list[dict[str, Any]]] = [first]
        self.texts: dict[int, str | None] = {}
        self.tools = tools
        await self._call(0)
        names, weights = zip(*ACTIONS, strict=True)
        for number in range(self.num_actions):
            action = chance.choices(names, weights)[0]
            place = chance.randrange(len(self.conversations))
            with contextlib.suppress(AgentCallError):  # the context is full
                await getattr(self, f"_{action}")(place, chance, f"{self.seed}-{number}")
                self.done[action] += 1
        return chance.random()

    # -- actions ------------------------------------------------------------------------------------------------------

    def _spelled(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """The text of a conversation; None if it has a turn that was rewritten."""
        text = ""
        for message in messages:
            if "spelled" in message:  # the template ends a turn that was cut
                text += message["spelled"].removesuffix("<eos>") + "<eos>"
            elif message.get("rewritten"):
                return None
            else:
                text += message["content"] + (":" if message["role"] == "tool" else "")
        return text

    def _sent(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in m.items() if k not in ("spelled", "rewritten")} for m in messages]

    def _note(self, replies: Sequence[Reply], messages: Sequence[dict[str, Any]], trains: bool = True) -> None:
        before = self._spelled(messages)
        self.read += [Read(reply, before, trains) for reply in replies]

    def _answered(self, messages: list[dict[str, Any]], reply: Reply) -> None:
        spelled = "".join(reply.token_texts)
        messages.append(reply.message.as_message() | {"spelled": spelled})

    async def _complete(self, messages: list[dict[str, Any]], **settings: Any) -> list[Reply]:
        """Calls the policy, and counts tokens that are older than the weights when the call first began."""
        version = self.begun.setdefault(settings.get("call_id") or uuid.uuid4().hex, self.newest())
        settings.setdefault("tools", self.tools)
        replies = await self.episode.complete(messages, **settings)
        self._count_older(replies, version)
        return replies

    def _count_older(self, replies: Sequence[Reply], version: int) -> None:
        self.num_older += sum(one < version for reply in replies for one in reply.versions)

    async def _call(self, place: int, **settings: Any) -> list[Reply]:
        messages = self.conversations[place]
        replies = await self._complete(self._sent(messages), **settings)
        self._note(replies, messages)
        self._answered(messages, replies[-1])
        return replies

    async def _turn(self, place: int, chance: random.Random, name: str) -> None:
        self.conversations[place].append({"role": "user", "content": f"{chance.randrange(99)}+{chance.randrange(99)}="})
        await self._call(place)

    async def _tool(self, place: int, chance: random.Random, name: str) -> None:
        self.conversations[place].append({"role": "tool", "content": str(chance.randrange(999))})
        await self._call(place)

    async def _branch(self, place: int, chance: random.Random, name: str) -> None:
        messages = self.conversations[place]
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        cut = chance.choice([0, *turns[:-1]]) + 1
        begin = [*messages[:cut], {"role": "user", "content": f"{chance.randrange(10)}+"}]
        self.conversations.append(copy.deepcopy(begin))
        await self._call(len(self.conversations) - 1)

    async def _many(self, place: int, chance: random.Random, name: str) -> None:
        self.conversations[place].append({"role": "user", "content": "1+2="})
        await self._call(place, n=3)

    async def _retry(self, place: int, chance: random.Random, name: str) -> None:
        messages = self.conversations[place]
        messages.append({"role": "user", "content": "7+7="})
        sent = self._sent(messages)
        replies = await self._complete(sent, call_id=name)
        again = await self._complete(sent, call_id=name)
        assert again is replies or again == replies, "a retry got another sample"
        self._note(replies, messages)
        self._answered(messages, replies[0])

    async def _retry_cancelled(self, place: int, chance: random.Random, name: str) -> None:
        messages = self.conversations[place]
        messages.append({"role": "user", "content": "8+8="})
        sent = self._sent(messages)
        first = asyncio.ensure_future(self._complete(sent, call_id=name))
        await asyncio.sleep(chance.choice((0.0, 0.002)))
        if not first.done():
            first.cancel()
        await asyncio.wait({first})
        replies = await self._complete(sent, call_id=name)
        self._note(replies, messages)
        self._answered(messages, replies[0])

    async def _abandon(self, place: int, chance: random.Random, name: str) -> None:
        messages = self.conversations[place]
        messages.append({"role": "user", "content": "9+9="})
        first = asyncio.ensure_future(self._complete(self._sent(messages)))
        await asyncio.sleep(chance.choice((0.0, 0.003)))
        first.cancel()
        await asyncio.wait({first})
        if not first.cancelled() and first.exception() is None:  # it was faster: the agent has read it
            self._note(first.result(), messages)
        await self._call(place)

    async def _side(self, place: int, chance: random.Random, name: str) -> None:
        messages = [{"role": "system", "content": f"title {chance.randrange(9)}"}, {"role": "user", "content": "12"}]
        replies = await self._complete(messages, tools=None)
        self._note(replies, messages, trains=False)

    async def _sub_agent(self, place: int, chance: random.Random, name: str) -> None:
        """Shares the system prompt of the main conversation (also none), and trains."""
        system = [message for message in self.conversations[0] if message["role"] == "system"]
        self.conversations.append([*system, {"role": "user", "content": f"sub {chance.randrange(99)}="}])
        await self._call(len(self.conversations) - 1)

    async def _together(self, place: int, chance: random.Random, name: str) -> None:
        messages = self.conversations[place]
        messages.append({"role": "user", "content": "3+4="})
        sent = self._sent(messages)
        found = await asyncio.gather(*(self._complete(sent) for _ in range(2)))
        for replies in found:
            self._note(replies, messages)
        self._answered(messages, found[0][0])

    async def _rewritten(self, place: int, chance: random.Random, name: str) -> None:
        """Sends the policy's own turns back with other whitespace, other JSON and reasoning: they are kept."""
        messages = self.conversations[place]
        messages.append({"role": "user", "content": "5+5="})
        sent = self._sent(messages)
        for message in sent:
            if message["role"] == "assistant":
                message["content"] = f"  {message['content']}\n"
                message["reasoning_content"] = "made up"
                for call in message.get("tool_calls", ()):
                    call["id"] = "another"
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=2)
        replies = await self._complete(sent)
        self._note(replies, messages)
        self._answered(messages, replies[0])

    async def _text(self, place: int, chance: random.Random, name: str) -> None:
        """A conversation through texts, without a template; its system prompt and tools are those of nobody."""
        known = self.texts.get(place % 2, f"{chance.randrange(99)}+1=")
        before, shown = known if isinstance(known, tuple) else (known, known)
        version = self.newest()
        (reply,) = await self.episode.complete_text(shown)
        self._count_older([reply], version)
        shares = not any(message["role"] == "system" for message in self.conversations[0])
        self.read.append(Read(reply, before, trains=shares))
        more = f"{chance.randrange(99)}:"
        self.texts[place % 2] = (before + "".join(reply.token_texts) + more, shown + reply.text + more)


# -- the oracle --------------------------------------------------------------------------------------------------------


class Oracle:
    """Log-probabilities with the weights of each version, one token after the other, in float64.

    Args:
        lm: the policy, as the engine got it.
        num_versions: versions of its weights, each a little further away.
    """

    def __init__(self, lm: Any, num_versions: int) -> None:
        self.models = [copy.deepcopy(lm) for _ in range(num_versions)]  # in float32, as the engine gets them
        generator = torch.Generator().manual_seed(0)
        for version, model in enumerate(self.models):
            if version:
                model.load_state_dict(self.models[version - 1].state_dict())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        self.exact = [copy.deepcopy(model).double() for model in self.models]
        for model in self.exact:
            for module in model.modules():
                if isinstance(module, LlamaRMSNorm):  # transformers computes it in float32, whatever comes in
                    module.forward = functools.partial(
                        F.rms_norm,
                        normalized_shape=module.weight.shape,
                        weight=module.weight,
                        eps=module.variance_epsilon,
                    )

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Weights of a version, by name."""
        return list(self.models[version].state_dict().items())

    @torch.no_grad()
    def logprobs(self, before: Sequence[int], ids: Sequence[int], versions: Sequence[int]) -> list[float]:
        """Of tokens that follow `before`, each computed with the weights of its version and the cache so far."""
        cache = DynamicCache()
        inputs = list(before)
        found = []
        for token, version in zip(ids, versions, strict=True):
            output = self.exact[version](torch.tensor([inputs]), past_key_values=cache, use_cache=True)
            found.append(float(torch.log_softmax(output.logits[0, -1].double(), -1)[token]))
            inputs = [token]
        return found


@dataclass
class Checked:
    """Result for one tree.

    Attributes:
        error: largest difference of log-probabilities in nats, over 1 + the size of the log-probability, with which
            rounding grows.
        num_tokens: tokens that train.
        num_older: sampled tokens that are older than the weights when their call began.
        drift: calls that should have continued a conversation and did not.
    """

    seed: int
    error: float
    num_tokens: int
    num_rows: int
    num_calls: int
    num_versions: int
    num_older: int
    drift: int
    actions: dict[str, int]


class Forest:
    """An engine with many trees, one sample each, and updates of the weights while they are played.

    Args:
        num_versions: weights that are published while a batch of trees is played.
        dtype: of the engine. In float64 rounding is no part of the differences; it hands log-probabilities over in
            float32 in any case.
    """

    def __init__(self, num_versions: int = 4, dtype: str = "float64") -> None:
        self.dtype = dtype
        self.codec = TextCodec(MODEL)
        lm = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.oracle = Oracle(lm, num_versions)
        self.num_versions = num_versions
        self.newest = 0

    def check(self, seeds: Sequence[int]) -> list[Checked]:
        """Plays the trees of these seeds together, and checks each.

        Raises:
            AssertionError: a tree's record is wrong.
        """
        self.newest = 0
        trees = {seed: Tree(seed, newest=lambda: self.newest) for seed in seeds}

        async def agent(prompt: Prompt, client: Any) -> float:
            return await trees[prompt.metadata["seed"]](prompt, client)

        inner = EmbeddedEngine(num_slots=16, self_check=False, dtype=self.dtype)
        engine = AgentEngine(
            inner, agent, chat_template=TEMPLATE, parser=CalculatorParser(), tries=None, timeout_s=120.0, max_calls=200
        )
        engine.setup(MODEL)
        engine.load_weights(0, self.oracle.weights(0))
        requests = [
            GenerationRequest(
                id=n,
                prompt_ids=(2,),
                num_samples=1,
                sampling=SamplingParams(max_tokens=6),
                prompt=Prompt(text=f"{seed % 97}+{seed % 89}=", metadata={"seed": seed}),
            )
            for n, seed in enumerate(seeds)
        ]
        engine.submit(requests)
        completions: dict[int, Completion] = {}
        until = time.monotonic() + 300
        while len(completions) < len(seeds):
            assert time.monotonic() < until, "the trees did not end"
            completions |= {seeds[c.request_id]: c for c in engine.poll(0.02)}
            version = self.newest + 1
            if version < self.num_versions and engine.num_tokens > version * 60 * len(seeds) / 4:
                engine.load_weights(version, self.oracle.weights(version))
                self.newest = version  # after the engine has them: a call that begins now gets no older ones
        try:
            return [self._checked(trees[seed], completions[seed], self.newest) for seed in seeds]
        finally:
            engine.close()
            engine.end()

    def _checked(self, tree: Tree, completion: Completion, newest: int) -> Checked:
        assert tree.episode is not None
        graph = tree.episode.graph
        assert graph.drift.total == 0, f"tree {tree.seed}: {graph.drift}"
        assert tree.num_older == 0, f"tree {tree.seed}: {tree.num_older} tokens are older than their call"
        expected = Counter(one.reply.token_ids for one in tree.read if one.trains)
        trained: Counter[tuple[int, ...]] = Counter()
        texts = {(one.reply.token_ids, one.reply.versions, one.reply.logprobs): one.before for one in tree.read}
        error = 0.0
        rows = rows_of(graph.turns)
        assert len(rows) == len(completion.rows)
        for row, recorded in zip(rows, completion.rows, strict=True):
            prompt_ids = completion.prompt_ids if recorded is completion else recorded.prompt_ids
            prompt_ids = tree.episode.request.prompt_ids if prompt_ids is None else prompt_ids
            ids = (*prompt_ids, *recorded.token_ids)
            position = len(prompt_ids)
            mask = recorded.loss_mask or ()
            assert sum(mask) == sum(len(turn.completion.token_ids) for turn in row.own)
            for number, turn in enumerate(row.own):
                position += len(turn.given_ids) if number else 0
                sampled = turn.completion
                end = position + len(sampled.token_ids)
                assert ids[position:end] == sampled.token_ids, f"tree {tree.seed}: tokens"
                place = slice(position - len(prompt_ids), end - len(prompt_ids))
                assert all(mask[place])
                assert recorded.versions[place] == sampled.versions
                assert 0 <= sampled.versions[0] <= sampled.versions[-1] <= newest
                spelled = texts[sampled.token_ids, sampled.versions, sampled.logprobs]
                if spelled is not None:
                    told = self.codec.tokenizer.decode(ids[:position])
                    assert told == spelled, f"tree {tree.seed}: {told!r} is not {spelled!r}"
                again = self.oracle.logprobs(ids[:position], sampled.token_ids, sampled.versions)
                noted = recorded.logprobs[place]
                error = max(error, max(abs(a - b) / (1 + abs(a)) for a, b in zip(again, noted, strict=True)))
                trained[sampled.token_ids] += 1
                position = end
        assert trained == expected, f"tree {tree.seed}: trained {trained - expected}, missing {expected - trained}"
        assert error <= TOLERANCES[self.dtype], f"tree {tree.seed}: log-probabilities differ by {error}"
        return Checked(
            seed=tree.seed,
            error=error,
            num_tokens=completion.num_trained_tokens,
            num_rows=len(rows),
            num_calls=tree.episode.num_calls,
            num_versions=len(set(completion.all_versions)),
            num_older=tree.num_older,
            drift=graph.drift.total,
            actions=dict(tree.done),
        )


def summary(files: Sequence[Path], *, machine: str) -> dict[str, Any]:
    """The measurement of what the files hold, the first of them the headline."""
    rows = []
    for path in files:
        found = json.loads(path.read_text())
        trees = found["trees"].values()
        sums = {name: sum(one[name] for one in trees) for name in SUMS}
        retries = [one["actions"].get(name, 0) for one in trees for name in ("retry", "retry_cancelled")]
        errors = [one["error"] for one in trees]
        above = sum(error > GOAL for error in errors)
        rows.append([found["dtype"], len(trees), *sums.values(), sum(retries), above, f"{max(errors):.2g}"])
    return measurement(
        "agent_trees",
        float(rows[0][-1]),
        f"nats, largest difference of a recorded log-probability over 1 + its size, engine in {rows[0][0]}",
        columns=["engine", "trees", *SUMS.values(), "retries", f"trees above {GOAL}", "largest difference, nats"],
        rows=rows,
        command=f"python benchmarks/agents/trees.py --trees {rows[0][1]} --out results/agent_trees.json",
        machine=machine,
    )


def main() -> None:
    """Plays the trees that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float64", help="of the engine")
    parser.add_argument("--out", type=Path, default=Path("results/agent_trees.json"))
    parser.add_argument("--summary", type=Path, nargs="+", help="files to sum up in --output; no tree is played")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/measurements/agent_trees.json")
    parser.add_argument("--machine", default="two cores")
    options = parser.parse_args()
    if options.summary:
        write_measurement(options.output, summary(options.summary, machine=options.machine))
        return
    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    if options.out.exists():
        found = json.loads(options.out.read_text())
        if found["dtype"] != options.dtype:
            raise SystemExit(f"--out {options.out} has trees in {found['dtype']}, and --dtype is {options.dtype}")
        known = found["trees"]
    missing = [seed for seed in range(options.trees) if str(seed) not in known]
    forest = Forest(dtype=options.dtype)
    for begin in range(0, len(missing), options.batch):
        known |= {str(one.seed): vars(one) for one in forest.check(missing[begin : begin + options.batch])}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(options.out) as file:
            file.write(json.dumps({"dtype": options.dtype, "trees": known}).encode())
        worst = max(one["error"] for one in known.values())
        print(f"{len(known)} trees, largest error {worst:.2g}", flush=True)


if __name__ == "__main__":
    main()

"""Tasks of `verifiers`: the agent of the page trains, exactly, and what fails says so. `make test-adapters`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-adapters`")

from agent_runs import CODEC, playing, request
from instant_episodes import Instant
from markdown_blocks import ROOT
from page_runs import TIMEOUT_S, check_that_no_file_has, metrics_of, shown, train

from lit_async_rl.agents.verifiers import INDEX, KEY, VerifiersAgent, VerifiersPrompts
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.problem import Prompt
from lit_async_rl.tasks import CalculatorParser

pytestmark = pytest.mark.timeout(400)
PAGE = ROOT / "docs" / "agents.md"
LOCAL = {"runtime": {"type": "subprocess"}}
PLANTED = "sk-planted-verifiers-0b6e5a"
TASKSET = '''
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class Data(vf.TaskData):
    answer: str = ""


class Task(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))

    @vf.reward
    async def fails(self, trace: vf.Trace) -> float:
        if self.data.answer == "fail":
            raise RuntimeError("the reward has no luck")
        return 0.25


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for answer in ("", "fail", "other", "again"):
            yield Task(Data(prompt=f"1+{len(answer)}=", name=answer, answer=answer), self.config.task)


class Endless(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield Task(Data(prompt="1+1="), self.config.task)


launched = []


class Asking(vf.Harness[vf.HarnessConfig]):
    """Calls the model from this process: in a conversation of two turns, again with the same body, and elsewhere."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        import httpx

        path = "/responses" if data.answer == "other" else "/chat/completions"
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, trust_env=False) as client:
            for turn in range(2):
                body = {"model": "any", "messages": messages, "input": data.prompt, "temperature": 0.3, "max_tokens": 4}
                for attempt in range(2):
                    retried = {"x-stainless-retry-count": str(attempt)}
                    answer = await client.post(endpoint + path, json=body, headers=retried, timeout=60)
                    if answer.status_code != 200:
                        return ProgramResult(1, "", answer.text)
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "2+2="}]
        launched.append(data.answer)
        return ProgramResult(int(data.answer == "again" and launched.count("again") == 1), "", "once more")


__all__ = [KIND, "Asking"]
'''


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """Name of a module with a taskset and a harness."""

    def make(kind="Tasks"):
        name = f"made_{kind.lower()}"
        (tmp_path / f"{name}.py").write_text(TASKSET.replace("KIND", repr(kind)))
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    yield make
    for name in [one for one in sys.modules if one.startswith("made_")]:
        del sys.modules[name]


def play(name, index, role=None, **settings):
    """The completion of one task, and the engine."""
    prompt = VerifiersPrompts({"id": name})[index]
    agent = VerifiersAgent({"taskset": {"id": name}, "agent": LOCAL | (role or {})})
    engine = playing(agent, Instant(), timeout_s=90.0, **settings)
    try:
        ((completion,),) = run_requests(engine, [request_of(prompt)], timeout_s=90.0)
    finally:
        engine.close()
        engine.end()
    return completion, engine


def request_of(prompt):
    return replace(request(), prompt=prompt)


def test_tasks_are_prompts(taskset):
    prompts = VerifiersPrompts({"id": taskset()}, size=2, first=1)
    assert [prompt.text for prompt in prompts] == ["1+4=", "1+5="]
    assert [prompt.metadata[INDEX] for prompt in prompts] == [1, 2]
    with pytest.raises(IndexError):
        prompts[2]
    with pytest.raises(ValueError, match=r"first=1 and size=4 needs 5 tasks.*has only 4 tasks"):
        VerifiersPrompts({"id": taskset()}, size=4, first=1)
    assert len(VerifiersPrompts({"id": taskset("Endless")}, size=5)) == 5
    with pytest.raises(ValueError, match=r"VerifiersPrompts\.size must be set"):
        VerifiersPrompts({"id": taskset("Endless")})


def test_an_episode_is_recorded_as_of_any_agent_and_a_retry_is_no_second_sample(taskset):
    """Two turns of a conversation, each asked for twice: two calls, one row, no drift."""
    completion, engine = play(taskset(), 0)
    assert engine.stats.num_calls == 2
    assert len(completion.rows) == 1
    assert sum(completion.rows[0].loss_mask) == 2  # `Instant` samples one token a call
    drift = engine.stats.drift
    assert (drift.template, drift.tokens, drift.other) == (0, 0, 0)
    assert completion.reward == pytest.approx(0.5 * 4 + 0.25)
    assert completion.reward_parts == {"said": 2.0, "fails": 0.25}


@pytest.mark.parametrize(
    ("index", "message"), [(1, "VerifiersError: .*the reward has no luck"), (2, "answers chat completions only")]
)
def test_an_episode_that_fails_is_an_agent_that_fails(taskset, index, message):
    with pytest.raises(EnvironmentFailure, match=message):
        play(taskset(), index, tries=None)


def test_a_runtime_that_wants_a_key_says_so(taskset, monkeypatch, tmp_path):
    """`verifiers` then exits in a task of its own, which must not end the event loop of all."""
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EnvironmentFailure, match="not authenticated with prime"):
        play(taskset(), 0, role={"runtime": {"type": "prime"}}, tries=None)


def test_what_a_discarded_try_has_sampled_does_not_train(taskset):
    completion, engine = play(taskset(), 3, role={"retries": {"max_retries": 1}})
    assert engine.stats.num_calls == 4
    assert engine.stats.num_orphans == 2
    assert len(completion.rows) == 1
    assert sum(completion.rows[0].loss_mask) == 2


class Calculating(Instant):
    """Asks for the tool, and then says what is not the sum."""

    def submit(self, requests):
        text = "7" if self.num_submits else "[12+30]"
        super().submit(requests)
        ids = (*CODEC.tokenizer.encode(text, add_special_tokens=False), CODEC.tokenizer.eos_token_id)
        turn = dict(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids))
        self.finished = [replace(completion, **turn) for completion in self.finished]


def test_null_continues_what_was_sampled_behind_a_call_of_its_tool(tmp_path, monkeypatch):
    shown(PAGE, tmp_path, "VerifiersAgent")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))  # of the tool server
    taskset = {"id": "sums_taskset"}
    agent = VerifiersAgent({"taskset": taskset, "agent": LOCAL | {"harness": {"id": "null"}, "max_turns": 3}})
    engine = playing(agent, Calculating(), timeout_s=200.0, parser=CalculatorParser(), tries=None)
    asked = request(max_tokens=12)
    try:
        prompt = VerifiersPrompts(taskset, size=1)[0]
        ((completion,),) = run_requests(engine, [replace(asked, prompt=prompt)], timeout_s=200.0)
    finally:
        engine.close()
        engine.end()
        sys.modules.pop("sums_taskset", None)
    assert engine.stats.num_calls == 2
    assert engine.stats.drift.total == 0
    assert len(completion.rows) == 1
    mask = completion.rows[0].loss_mask
    given = [token for token, on in zip(completion.rows[0].token_ids, mask, strict=True) if not on]
    assert CODEC.tokenizer.decode(given) == "42:"  # the tool's answer, and nothing else, between the two turns
    assert completion.reward == 0.0


def test_prompts_of_something_else_are_refused(taskset):
    name = taskset()
    agent = VerifiersAgent({"taskset": {"id": name}, "agent": LOCAL})
    for prompt, message in (
        (Prompt(text="1+1="), "needs data.prompts of class VerifiersPrompts"),
        (
            Prompt(text="1+1=", metadata={INDEX: 0, KEY: "of another"}),
            "differs between VerifiersPrompts and the taskset",
        ),
        (
            Prompt(text="1+1=", metadata={INDEX: 99, KEY: "of another"}),
            "differs between VerifiersPrompts and the taskset",
        ),
    ):
        engine = playing(agent, Instant(), timeout_s=60.0, tries=None)
        try:
            with pytest.raises(EnvironmentFailure, match=message):
                run_requests(engine, [request_of(prompt)], timeout_s=60.0)
        finally:
            engine.close()
            engine.end()


def test_the_agent_of_the_page_trains_word_for_word_and_no_key_is_written(tmp_path):
    """`null` starts as a program for each episode, and calls its tool on a server; the policy calls it at random."""
    config = shown(PAGE, tmp_path, "VerifiersAgent")
    tape = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", str(tmp_path / "runs" / "tape")]
    runs = train(
        tmp_path,
        config,
        *tape,
        policy="calculator_policy",
        validation=None,
        PRIME_API_KEY=PLANTED,
        OPENAI_API_KEY=PLANTED,
        WANDB_MODE="offline",
    )
    found = metrics_of(runs)
    assert found["agent/num_calls"][-1] >= 8
    assert found["agent/num_lost"][-1] == 0
    assert found["agent/drift_template"][-1] == found["agent/drift_tokens"][-1] == found["agent/drift_other"][-1] == 0
    assert max(found["sample/staleness_max"]) <= 4
    check_that_no_file_has({PLANTED}, tmp_path)


def test_the_example_trains(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "verifiers_sums.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "'agent/num_lost': 0.0" in done.stdout, done.stdout[-2000:]

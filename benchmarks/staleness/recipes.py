"""Recipes for stale data on the quick start's task, at a lag of exactly four versions, without engine or Trainer.

    python -m benchmarks.staleness.recipes --recipe vcpo_score --seed 100

One process samples with the weights of four steps ago and trains, with the package's own losses, corrections, baseline
and batches: a minute of processor time for 200 steps. Prints a line and appends it to `--out` as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache

from lit_async_rl import asset
from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.weights import BehaviorProximal, CurrentProximal
from lit_async_rl.data.collate import collate_step
from lit_async_rl.importance import ess_ratio, masked
from lit_async_rl.losses import CISPO, PPOClip, Reinforce
from lit_async_rl.losses.aggregation import SequenceMean, TokenMean
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards import exact_match
from lit_async_rl.tasks.sorting import SortDigits
from lit_async_rl.training.objective import Objective
from lit_async_rl.training.optimizer import Cosine, OneCycle, RateSchedule, StableDecay
from lit_async_rl.types import Rollout, RolloutGroup

NUM_GROUPS = 32
GROUP_SIZE = 8
MAX_TOKENS = 12
MAX_NORM = 0.5
SETTLED = 15  # falls of the smoothed reward count once its window lies behind this step
WINDOW = 5
NUM_HELD_OUT = 512  # of each held-out prompt: a standard error of 0.006
NUM_SAMPLES = 4
SCHEDULES: dict[str, RateSchedule] = {
    "cosine": Cosine(warmup=0.1),
    "one_cycle": OneCycle(),
    "stable_decay": StableDecay(warmup=0.1),
    "stable_long_decay": StableDecay(warmup=0.1, decay=0.5),
}


def objective(recipe: str, cap: float) -> Objective:
    """The loss of a recipe; `cap` truncates sequence weights, or is the bound of the dual clip or of CISPO."""
    match recipe:
        case "plain":
            return Objective(
                PPOClip(clip_high=0.28),
                BehaviorProximal(),
                None,
                baseline=None,
                kl_coefficient=0.0,
                entropy_coefficient=0.0,
            )
        case "dual_clip":
            return Objective(
                PPOClip(clip_high=0.28, dual_clip=cap),
                BehaviorProximal(),
                None,
                baseline=None,
                kl_coefficient=0.0,
                entropy_coefficient=0.0,
            )
        case "cispo":
            return Objective(
                CISPO(clip_high=cap - 1),
                BehaviorProximal(),
                None,
                baseline=None,
                kl_coefficient=0.0,
                entropy_coefficient=0.0,
            )
        case "vcpo_score":
            baseline = OptimalBaseline(norms=Norms.SCORE)
        case "vcpo_last_block":
            baseline = OptimalBaseline(last_blocks=1)
        case _:
            raise ValueError(f"recipe={recipe!r}: there is no such recipe")
    return Objective(
        Reinforce(),
        CurrentProximal(),
        SequenceTruncatedIS(cap=cap),
        baseline=baseline,
        kl_coefficient=0.0,
        entropy_coefficient=0.0,
    )


@torch.no_grad()
def sample(lm: Any, ids: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their log-probabilities, and where there are any, [P x num, T], for prompts [P, L] of one length."""
    cache = DynamicCache()
    logits = lm(input_ids=ids, past_key_values=cache).logits[:, -1].repeat_interleave(num, 0)
    if num > 1:
        cache.batch_repeat_interleave(num)
    done = torch.zeros(len(logits), dtype=torch.bool)
    columns = []
    for n in range(MAX_TOKENS):
        if n:
            logits = lm(input_ids=columns[-1][0][:, None], past_key_values=cache).logits[:, -1]
        logprobs = logits.log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1)
        columns.append((tokens[:, 0], logprobs.gather(1, tokens)[:, 0], ~done))
        done = done | (tokens[:, 0] == lm.config.eos_token_id)
        if done.all():
            break
    tokens, logprobs, alive = (torch.stack(values, 1) for values in zip(*columns, strict=True))
    return tokens, logprobs, alive


def rollouts(
    lm: Any, tokenizer: Any, prompts: list[Prompt], num: int, version: int, first: int = 0
) -> list[RolloutGroup]:
    """Scored groups of `num` completions."""
    ids = torch.tensor([tokenizer(prompt.text).input_ids for prompt in prompts])
    tokens, logprobs, alive = sample(lm, ids, num)
    rows = []
    for n, length in enumerate(alive.sum(1).tolist()):
        own = tuple(tokens[n, :length].tolist())
        text = tokenizer.decode(own, skip_special_tokens=True)
        reward = float(exact_match(prompts[n // num], text))
        rollout = Rollout(
            token_ids=own,
            logprobs=tuple(logprobs[n, :length].tolist()),
            versions=(version,) * length,
            finish_reason="stop",
            text=text,
            reward=reward,
        )
        rows.append(rollout)
    return [
        RolloutGroup(
            index=first + n,
            prompt=prompt,
            prompt_ids=tuple(ids[n].tolist()),
            rollouts=tuple(rows[n * num : (n + 1) * num]),
            admitted_version=version,
        )
        for n, prompt in enumerate(prompts)
    ]


def mean_reward(groups: list[RolloutGroup]) -> float:
    """Over all completions."""
    return statistics.fmean(rollout.reward for group in groups for rollout in group.rollouts)


def largest_fall(rewards: list[float]) -> float:
    """Largest fall of the running mean of the rewards below its maximum so far."""
    smooth = [statistics.fmean(rewards[max(0, n + 1 - WINDOW) : n + 1]) for n in range(len(rewards))]
    highest = 0.0
    fall = 0.0
    for value in smooth[SETTLED + WINDOW - 1 :]:
        highest = max(highest, value)
        fall = max(fall, highest - value)
    return fall


@dataclass(frozen=True)
class Result:
    """Rewards and effective sample sizes by step, and the held-out accuracy at the end."""

    rewards: list[float]
    ess: list[float]
    held_out: float


def train(args: argparse.Namespace) -> Result:
    """One run of `args.num_steps` steps, every batch sampled `args.lag` versions ago."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    path = asset("sort_policy")
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = CausalPolicy(load_policy(path, dtype="float32", device="cpu"), 4096, PrefixTreePacking())
    sampler: Any = load_policy(path, dtype="float32", device="cpu").requires_grad_(False)
    loss_of = objective(args.recipe, args.cap)
    schedule = SCHEDULES[args.schedule]
    aggregation = SequenceMean() if args.recipe.startswith("vcpo") else TokenMean()
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, args.beta2), weight_decay=0.0)
    stream = PromptStream(SortDigits(num_digits=8, size=100000), seed=args.seed)
    versions: deque[dict[str, torch.Tensor]] = deque(maxlen=args.lag + 1)
    rewards = []
    ess = []
    for step in range(args.num_steps):
        versions.append({name: value.detach().clone() for name, value in policy.lm.state_dict().items()})
        sampler.load_state_dict(versions[0])
        prompts = [stream.next() for _ in range(NUM_GROUPS)]
        version = step - len(versions) + 1
        groups = rollouts(sampler, tokenizer, prompts, num=GROUP_SIZE, version=version, first=step * NUM_GROUPS)
        rewards.append(mean_reward(groups))
        (batch,) = collate_step(
            groups,
            advantage=GroupMeanStd(),
            aggregation=aggregation,
            keep_groups_whole=True,
            num_micro_batches=1,
            pad_token_id=0,
            temperature=1.0,
        )
        loss, signals = loss_of(policy, None, batch, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        ess.append(float(ess_ratio(masked(signals["log_ratio"], signals["mask"]).sum(1))))
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(args.learning_rate, step, args.num_steps) * ess[-1] ** args.ess_power
            momentum = schedule.momentum(step, args.num_steps)
            group["betas"] = (group["betas"][0] if momentum is None else momentum, args.beta2)
        optimizer.step()
    held_out = SortDigits(num_digits=8, size=NUM_HELD_OUT, split="held_out")
    last = rollouts(
        policy.lm, tokenizer, [held_out[n] for n in range(NUM_HELD_OUT)], num=NUM_SAMPLES, version=args.num_steps
    )
    return Result(rewards, ess, mean_reward(last))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="vcpo_score", help="plain, dual_clip, cispo, vcpo_score, vcpo_last_block")
    parser.add_argument("--cap", type=float, default=8.0, help="see `objective`")
    parser.add_argument("--schedule", choices=SCHEDULES, default="stable_decay")
    parser.add_argument("--learning_rate", type=float, default=1.1e-4)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--ess_power", type=float, default=0.5, help="0: the rate does not follow the sample size")
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes.jsonl"))
    args = parser.parse_args()
    result = train(args)
    last = statistics.fmean(result.rewards[-20:])
    found = dict(held_out=result.held_out, last_rewards=last, fall=largest_fall(result.rewards), ess=min(result.ess))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    with args.out.open("a") as file:
        file.write(json.dumps({**settings, **found, "rewards": result.rewards}) + "\n")
    print(settings, {name: round(value, 3) for name, value in found.items()})


if __name__ == "__main__":
    main()

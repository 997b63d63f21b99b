"""The whole algorithm in one file: asynchronous reinforcement learning of a language model, without a trainer.

    python examples/loop.py

A small policy learns to sort digits, in half a minute on one core. The producer's thread samples completions with the
engine's own copy of the weights; meanwhile the main thread trains on finished groups, and publishes new weights. So a
completion is some versions old when it is trained on. Two mechanisms keep that harmless:

* admission samples a group only if it is certain to be trained on within `MAX_STALENESS` versions;
* importance weights account for the difference between the policy that sampled a token and the one that trains.

These are the parts of every run. `lit_async_rl.fit` adds what the algorithm does not need: ranks, checkpoints, engines
that are restarted, validation, callbacks. `lit_async_rl/rollouts/producer.py` draws the life of a group.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

import lit_async_rl as rl
from lit_async_rl.data.collate import collate_step
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import check_bound

GROUPS_PER_STEP = 16  # prompts of an optimizer step
GROUP_SIZE = 8  # completions of a prompt, whose rewards are compared with each other
MAX_STALENESS = 4  # in versions; with 0 engine and optimizer wait for each other
LEARNING_RATE = 6e-5

ADVANTAGE = rl.GroupMeanStd()  # GRPO
AGGREGATION = rl.SequenceMean()  # every completion counts the same, however long it is
CORRECTION = rl.SequenceTruncatedIS(cap=8.0)  # cut, because a product of ratios over many tokens has heavy tails
LOSS = rl.Reinforce()


class Step(NamedTuple):
    """Metrics of an optimizer step; staleness is the age of its tokens, in versions."""

    step: int
    version: int
    reward: float
    mean_staleness: float
    max_staleness: int


def step_loss(policy: CausalPolicy, batch: rl.RolloutBatch, version: int) -> Tensor:
    """Policy gradient loss with importance weights, averaged over the step."""
    stats = policy(batch.input_ids, batch.loss_mask, batch.temperature)
    current = stats.logprobs.detach()

    # log pi - log mu of each token. The engine recorded mu when it sampled; to compute it again would need the old
    # weights, and would miss the engine's rounding.
    weights = CORRECTION(current - batch.behavior_logprobs, batch.loss_mask).weights
    output = LOSS(
        rl.LossInputs(
            logprobs=stats.logprobs,
            proximal_logprobs=current,  # the ratio in the loss is 1: the correction alone accounts for pi / mu
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            staleness=torch.where(batch.loss_mask, version - batch.versions, 0),
            token_weights=batch.token_weights,
            group_index=batch.group_index,
        )
    )
    # losses are per token; the token weights, which sum to 1, say how they are averaged
    return (batch.token_weights * weights * output.per_token).sum()


def main(steps: int = 60) -> list[Step]:
    """Trains for this many steps, or until Ctrl+C."""
    model = rl.asset("sort_policy")
    codec = rl.TextCodec(model)
    policy = CausalPolicy(load_policy(model))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    # The engine has weights of its own, so that it can sample while these are trained. With in-flight updates it takes
    # new ones between two tokens: a completion may have tokens of several versions, and each is tagged with its own.
    version = 0
    engine = rl.EmbeddedEngine(in_flight_weight_updates=True)
    engine.setup(model)  # the architecture alone: the first weights come from the policy, as all others do
    engine.load_weights(version, stream_weights(policy))

    sampling = rl.SamplingParams(max_tokens=12)
    producer = Producer(
        engine=engine,
        stream=PromptStream(rl.SortDigits(num_digits=8, size=100_000)),
        codec=codec,
        scorer=Scorer(rl.exact_match),
        # The bound holds by counting, and no group is thrown away for it: there are (MAX_STALENESS + 1) x
        # GROUPS_PER_STEP slots, a group takes one before it is sampled, and a publication returns those of its step.
        admission=rl.Bounded().make(GROUPS_PER_STEP, MAX_STALENESS),
        group_size=GROUP_SIZE,
        sampling=sampling,
        timeout_s=60.0,
    )
    records: list[Step] = []
    try:
        producer.start(version)
        for step in range(steps):
            # Waits only where the engine is slower than training. Here it is faster: finished groups queue up until
            # all slots are taken, and the lag settles at the bound.
            groups = [producer.take() for _ in range(GROUPS_PER_STEP)]
            check_bound(groups, version)  # raises if admission has broken its promise, which nothing else would show
            (batch,) = collate_step(  # all groups at once: advantages and token weights depend on the whole step
                groups,
                advantage=ADVANTAGE,
                aggregation=AGGREGATION,
                num_micro_batches=1,
                pad_token_id=codec.pad_token_id,
                temperature=sampling.temperature,
            )
            optimizer.zero_grad()
            step_loss(policy, batch, version).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            producer.begin_step()  # the groups taken so far are trained on, and forgotten

            ages = (version - batch.versions)[batch.loss_mask]
            reward = float(batch.rewards.mean())
            staleness = float(ages.float().mean())
            records.append(Step(step, version, reward, mean_staleness=staleness, max_staleness=int(ages.max())))
            print("  ".join(f"{name} {value:.4g}" for name, value in records[-1]._asdict().items()), flush=True)

            # First the weights, then the slots: a group that is admitted to a slot of this step gets no older token.
            version += 1
            producer.listener.load_weights(version, stream_weights(policy))
            producer.advance(version)
    except KeyboardInterrupt:
        print(f"interrupted after {len(records)} steps")
    finally:
        producer.stop()
        engine.close()
    return records


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Asynchronous reinforcement learning in one file.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    main(parser.parse_args().steps)

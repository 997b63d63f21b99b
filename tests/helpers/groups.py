"""Groups made by hand, and a producer with its threads on a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence

from flow import MODEL

from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import AdmissionPolicy, Bounded
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import LogNormal
from lit_async_rl.tasks import SortDigits
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup


def group(rewards, lengths=None, index=0, reasons=None) -> RolloutGroup:
    lengths = lengths or [3] * len(rewards)
    reasons = reasons or ["stop"] * len(rewards)
    rollouts = [
        Rollout(
            token_ids=(1,) * n,
            logprobs=(-1.0,) * n,
            versions=(0,) * n,
            finish_reason=reason,
            text="",
            reward=reward,
        )
        for reward, n, reason in zip(rewards, lengths, reasons, strict=True)
    ]
    return RolloutGroup(
        index=index, prompt=Prompt(text="p"), prompt_ids=(1,), rollouts=tuple(rollouts), admitted_version=0
    )


def collate(groups: Sequence[RolloutGroup], num_micro_batches: int) -> list[RolloutBatch]:
    """Micro-batches of one step, with the default advantages and token weights."""
    return collate_step(
        groups,
        advantage=GroupMeanStd(),
        aggregation=TokenMean(),
        num_micro_batches=num_micro_batches,
        pad_token_id=0,
        temperature=1.0,
    )


def simulated(
    intake: Intake,
    max_staleness: int,
    reward,
    num_steps: int,
    num_slots: int = 16,
    groups: int = 4,
    policy: AdmissionPolicy = Bounded(),  # noqa: B008  frozen
):
    """Groups of each step, with the producer, on an engine whose completions are as long as they take."""
    engine = SimulatedEngine(LogNormal(0.01, 1.0), num_slots=num_slots, tokens_per_s=2000.0)
    admission = policy.make(groups, max_staleness)
    producer = Producer(
        engine=engine,
        stream=PromptStream(SortDigits(8, size=64)),
        codec=TextCodec(MODEL),
        scorer=Scorer(reward),
        admission=admission,
        group_size=2,
        sampling=SamplingParams(max_tokens=10**6),
        timeout_s=20.0,
        intake=intake,
    )
    steps = []
    producer.start(0)
    try:
        for step in range(num_steps):
            producer.begin_step()
            steps.append([producer.take() for _ in range(groups)])
            producer.listener.load_weights(step + 1, [])
            producer.advance(step + 1)
        producer.begin_step()
    finally:
        producer.stop()
        engine.close()
    return steps, producer

"""Validation: accuracy on held-out prompts, sampled with the current weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import MeanMetric, SumMetric
from transformers import PreTrainedModel

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.attention import decoding_attention
from lit_async_rl.models.loading import evaluation_mode, load_policy
from lit_async_rl.models.weights import apply_weights, is_sharded, receive_weights
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import pass_at_k
from lit_async_rl.rewards.success import Success
from lit_async_rl.types import PromptBatch


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One held-out completion with its reward."""

    prompt: Prompt
    completion: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Unscored completions of one prompt; `trainer.predict` returns lists of them."""

    prompt: Prompt
    completions: tuple[str, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Prediction:
        """Returns itself: Lightning moves what `trainer.predict` returns, but this has no tensors."""
        return self


class Validator(torch.nn.Module):
    """Samples and scores held-out prompts and averages over all ranks.

    A completion is correct if its reward is at least `data.validation.success_reward`. Every validation uses the same
    random numbers, so that differences are due to the policies.
    """

    def __init__(self) -> None:
        super().__init__()
        # the errors come from variances, differences of two means, which cancel in float32 if rewards are far from 0
        wide = torch.float32 if torch.backends.mps.is_available() else torch.float64  # MPS has no float64
        self.reward = MeanMetric().set_dtype(wide)
        self.pass_at_1 = MeanMetric().set_dtype(wide)
        self.pass_at_k = MeanMetric().set_dtype(wide)
        self.cut = MeanMetric()
        self.squares: Any = torch.nn.ModuleList(MeanMetric().set_dtype(wide) for _ in range(3))  # of the first three
        self.num_prompts = SumMetric()
        self.num_scored = 0  # prompts of the last validation, on all ranks
        self.half_widths: dict[str, float] = {}  # 95 %, of its averages over prompts
        self.samples: list[Sample] = []
        self.num_samples = 1
        self._is_checked = False  # by the self-check: once suffices, as each copy has the same architecture
        self._whole_models: list[PreTrainedModel] = []  # in a list, so that torch does not register it as a submodule

    def begin(self, module: Any) -> None:
        """Resets the metrics; copies a sharded policy in full to every rank, and merges LoRA on a CPU. A collective."""
        for metric in (self.reward, self.pass_at_1, self.pass_at_k, self.cut, self.num_prompts, *self.squares):
            metric.reset()
        self.samples = []
        policy_dtype = str(next(module.policy.parameters()).dtype).removeprefix("torch.")
        if is_sharded(module.trainer.strategy.model or module):
            self._whole_models = [_whole_copy(module, policy_dtype)]
        elif module.policy.has_adapters and module.device.type == "cpu":  # halves the time of SmolLM2, for one copy
            is_mixed = module.trainer.precision == "bf16-mixed"
            self._whole_models = [_whole_copy(module, "bfloat16" if is_mixed else policy_dtype)]

    def end(self) -> None:
        """Frees the copy."""
        self._whole_models = []

    @torch.no_grad()
    def step(self, module: Any, batch: PromptBatch) -> None:
        """Samples `data.validation.num_samples` completions of each prompt of the batch, and scores them."""
        data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
        self.num_samples = data.validation.num_samples
        prompts, completions, texts = self._sample(module, batch)
        for row in completions:
            self.cut.update(sum(completion.finish_reason == "length" for completion in row) / len(row))
        rewards = [[completion.reward for completion in row] for row in completions]
        if any(reward is None for row in rewards for reward in row):
            unscored = [(prompt, text) for prompt, row in zip(prompts, texts, strict=True) for text in row]
            ids = [completion.token_ids for row in completions for completion in row]
            scored = iter(data.held_out.score(unscored, data.note_progress, ids))
            rewards = [[next(scored) for _ in row] for row in texts]
        for prompt, row, row_rewards in zip(prompts, texts, rewards, strict=True):
            self._add_samples(prompt, row, row_rewards, success=data.held_out.success)

    @torch.no_grad()
    def predict(self, module: Any, batch: PromptBatch) -> list[Prediction]:
        """Samples `data.validation.num_samples` completions of each prompt of the batch."""
        prompts, _, texts = self._sample(module, batch)
        return [Prediction(prompt=prompt, completions=tuple(row)) for prompt, row in zip(prompts, texts, strict=True)]

    def _sample(self, module: Any, batch: PromptBatch) -> tuple[list[Prompt], list[Any], list[list[str]]]:
        """The prompts that were answered, their completions, and the texts of these."""
        data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
        if not batch.prompts:
            return [], [], []
        requests = [
            GenerationRequest(
                id=n,
                prompt_ids=data.codec.encode(prompt),
                num_samples=data.validation.num_samples,
                sampling=data.val_sampling,
                prompt=prompt,
                seed=batch.index * 2**40 + n * data.validation.num_samples,
            )
            for n, prompt in enumerate(batch.prompts)
        ]
        lm = self._whole_models[0] if self._whole_models else module.policy.causal_lm
        with evaluation_mode(lm), decodable(lm):
            engine_check = data.engine.self_check
            checks = not self._is_checked and (module.self_check if engine_check is None else engine_check)
            side = "engine" if engine_check is not None else "validation"
            embedded = EmbeddedEngine.from_module(lm, data.engine.num_slots, self_check=checks, side=side)
            self._is_checked = True
            engine = data.engine.around(embedded, data.codec)
            with closing(engine):
                completions = run_requests(
                    engine,
                    requests,
                    data.codec.vocab_size,
                    timeout_s=data.limits.rollout_timeout_s,
                    on_progress=data.note_progress,
                )
        # episodes that failed for good have no completions
        whole = data.validation.num_samples
        pairs = [(prompt, row) for prompt, row in zip(batch.prompts, completions, strict=True) if len(row) == whole]
        prompts = [prompt for prompt, _ in pairs]
        completions = [row for _, row in pairs]
        stop = data.val_sampling.stop
        stop_token_ids = data.val_sampling.stop_token_ids
        texts = [
            [data.codec.decode(c.token_ids, stop if c.turns is None else (), stop_token_ids) for c in row]
            for row in completions
        ]
        return prompts, completions, texts

    def _add_samples(
        self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[float | None], success: Success
    ) -> None:
        known = [reward for reward in rewards if reward is not None]
        if len(known) == len(rewards):  # a prompt that could not be scored in `data.scoring.tries` does not count
            self._update(known, success)
        self.samples += [
            Sample(prompt=prompt, completion=text, reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
            if reward is not None
        ]

    def _update(self, rewards: Sequence[float], success: Success) -> None:
        correct = success.number(rewards)
        self.num_prompts.update(1)
        values = (
            sum(rewards) / len(rewards),
            pass_at_k(len(rewards), correct, 1),
            pass_at_k(len(rewards), correct, len(rewards)),
        )
        means = (self.reward, self.pass_at_1, self.pass_at_k)
        for mean, square, value in zip(means, self.squares, values, strict=True):
            mean.update(value)
            square.update(value**2)

    def compute(self) -> dict[str, torch.Tensor]:
        """Averages over all prompts of all ranks. A collective."""
        metrics = {"val/reward": self.reward.compute(), "val/pass@1": self.pass_at_1.compute()}
        metrics["val/cut_share"] = self.cut.compute()
        if self.num_samples > 1:
            metrics[f"val/pass@{self.num_samples}"] = self.pass_at_k.compute()
        self.num_scored = int(self.num_prompts.compute())
        self.half_widths = self._half_widths(self.num_scored)
        return metrics

    def _half_widths(self, num: int) -> dict[str, float]:
        """95 % half-widths of the averages over `num` prompts, which count as independent. A collective.

        For shares of correct completions two correct and two wrong prompts are added (Agresti and Coull, 1998): no
        half-width is 0 because all prompts agree.
        """
        names = ["val/reward", "val/pass@1", f"val/pass@{self.num_samples}"]
        means = [self.reward, self.pass_at_1, self.pass_at_k]
        widths = {}
        for name, mean, square in zip(names, means, self.squares, strict=True):
            total = num + 4 if "pass" in name else num
            if total < 2:
                continue
            average = (num * float(mean.compute()) + (total - num) / 2) / total
            variance = (num * float(square.compute()) + (total - num) / 2) / total - average**2
            degrees = total if "pass" in name else total - 1
            widths[name] = 1.96 * math.sqrt(max(variance, 0.0) / degrees)
        return widths


@contextmanager
def decodable(lm: PreTrainedModel) -> Iterator[None]:
    """Context in which a model with `flex_attention`, which only trains, uses a kernel that can decode."""
    chosen = lm.config._attn_implementation
    if chosen in ("sdpa", "eager"):
        yield
        return
    lm.set_attn_implementation(decoding_attention(lm))
    try:
        yield
    finally:
        lm.set_attn_implementation(chosen)


@torch.no_grad()
def _whole_copy(module: Any, dtype: str) -> PreTrainedModel:
    """The unsharded policy on this device, LoRA merged. A collective: all ranks call."""
    data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
    lm = load_policy(data.model, dtype=dtype, random_init=True, device=str(module.device))
    apply_weights(lm, receive_weights(lm, module.stream_weights()))
    return lm

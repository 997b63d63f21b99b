"""Reference implementation of `FixedLag`: a plain loop without threads, checkpoints or engine."""

from __future__ import annotations

from benchmarks.state_machine.engine import NumberedPrompts, mix, sample_length, sample_token
from benchmarks.state_machine.modules import VirtualSettings, gradient_of
from lit_async_rl.prompts.stream import PromptStream


class PlainLoop:
    """Weights of `FixedLag` after each step."""

    def __init__(self, settings: VirtualSettings) -> None:
        self.settings = settings
        self.weights = [1]  # before each step
        self._stream = PromptStream(NumberedPrompts(11), seed=3)

    def after(self, num_steps: int) -> int:
        """Weights after `num_steps` steps."""
        while len(self.weights) <= num_steps:
            self._train(len(self.weights) - 1)
        return self.weights[num_steps]

    def _train(self, step: int) -> None:
        size, per_round = self.settings.groups_per_step, self.settings.groups_per_step * self.settings.sync_steps
        gradient = 0
        for group in range(step * size, (step + 1) * size):
            sampled_in = max(0, group // per_round - self.settings.max_staleness)
            weights, prompt = self.weights[sampled_in * self.settings.sync_steps], self._stream.number_at(group)
            for n in range(self.settings.group_size):
                draw = group * self.settings.group_size + n
                tokens = tuple(sample_token(weights, prompt, draw, k) for k in range(sample_length(draw)))
                gradient += gradient_of(group, tokens)
        before = self.weights[step]
        self.weights.append(before if self.settings.skips_step(step) else mix(before, gradient))

"""Streamed steps: the gradient is the synchronous one whatever finishes first, and training overlaps with sampling."""

import random
import signal
import threading

import lightning.pytorch as pl
import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.advantages.group import GlobalMeanStd
from lit_async_rl.callbacks import SaveOnSigterm
from lit_async_rl.data.collate import StreamedStep
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import StalledError
from lit_async_rl.losses.aggregation import Aggregation, FixedLength, PromptMean, SequenceMean, TokenBudget, TokenMean
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.tasks import SortDigits
from lit_async_rl.types import Rollout, RolloutGroup

AGGREGATIONS = [TokenMean(), SequenceMean(), PromptMean(), FixedLength(7), TokenBudget(50)]


class ShuffledEngine(EmbeddedEngine):
    """Samples what it would anyway, and hands it out in random order."""

    def __init__(self, seed: int) -> None:
        super().__init__(in_flight_weight_updates=False)
        self.chance, self.held = random.Random(seed), []

    def poll(self, timeout_s):
        found = super().poll(0.005)
        self.held += found
        self.chance.shuffle(self.held)
        if found:
            return []  # as long as there is more
        released, self.held = self.held[:3], self.held[3:]
        return released


def after_ten_steps(stream: bool, seed: int, **module_settings) -> tuple[torch.Tensor, list[list[int]]]:
    orders = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            orders.append([group.index for group in trainer.datamodule.last_step_groups])

    module = make_module(**module_settings)
    engine = ShuffledEngine(seed) if stream else barrier_engine()
    data = make_data(max_staleness=0, engine=engine, stream_groups=stream, micro_batches_per_step=4)
    fit(module, data, 10, [Watch()])
    return parameters(module), orders[3::4]


def sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4)  # smaller: rounding errors of zero gradients show


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(optimizer=sgd), dict(optimizer=adamw)], ids=["SGD", "AdamW"])
def test_after_ten_steps_in_random_order_parameters_are_the_synchronous_ones(settings):
    expected, in_order = after_ten_steps(False, 0, **settings)
    actual, shuffled = after_ten_steps(True, 1, **settings)
    assert [sorted(step) for step in shuffled] == [sorted(step) for step in in_order]
    assert shuffled != in_order
    assert (actual - expected).abs().max() <= 1e-6
    assert (actual - parameters(make_module())).abs().max() > 1e-3, "they have moved"


class HoldingEngine(EmbeddedEngine):
    """Keeps the last group of each step back until somebody has been training on the others."""

    def __init__(self) -> None:
        super().__init__(in_flight_weight_updates=False)
        self.trained, self.held = threading.Semaphore(0), []

    def poll(self, timeout_s):
        found = super().poll(0.01)
        self.held += [c for c in found if c.request_id % 4 == 3]
        released = [c for c in found if c.request_id % 4 != 3]
        if len(self.held) == 4 and self.trained.acquire(blocking=False):
            released, self.held = released + self.held, []
        return released


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_the_first_micro_batches_are_trained_on_while_the_last_group_is_sampled(stream):
    engine, scales = HoldingEngine(), []

    class Release(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            scales.append(batch.gradient_scale)
            if batch_idx % 4 == 2:
                engine.trained.release()

    settings = dict(max_staleness=0, micro_batches_per_step=4, engine=engine, rollout_timeout_s=1.0)
    prompts = SortDigits(8, size=1000)  # with these no last group has just the tokens that were expected of it
    data = make_data(**settings, stream_groups=stream, prompts=prompts)
    if stream:
        fit(make_module(), data, 3, [Release()])
        assert len(scales) == 12
        assert all((scale == 1.0) == (n % 4 != 3) for n, scale in enumerate(scales))
    else:
        with pytest.raises(StalledError):
            fit(make_module(), data, 3, [Release()])


def group(index: int, lengths: list[int]) -> RolloutGroup:
    rollouts = [
        Rollout(
            token_ids=(0,) * length,
            logprobs=(0.0,) * length,
            versions=(0,) * length,
            finish_reason="stop",
            text="",
            reward=0.0,
        )
        for length in lengths
    ]
    return RolloutGroup(
        index=index, prompt=Prompt(text=""), prompt_ids=(1,), rollouts=tuple(rollouts), admitted_version=0
    )


@given(
    st.sampled_from(AGGREGATIONS),
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=6),
    st.data(),
)
def test_weights_of_the_parts_times_the_scale_are_those_of_the_step(aggregation, lengths, data):
    num_parts = data.draw(st.integers(1, len(lengths)))
    step, weights, scales = StreamedStep(aggregation, len(lengths), num_parts), [], []
    while not step.is_done:
        begin = len(step.groups)
        part = [group(n, lengths[n]) for n in range(begin, begin + step.next_size)]
        flat = [length for one in lengths[begin : begin + len(part)] for length in one]
        weights += step.add(part)(flat, [2] * len(part))
        scales.append(step.gradient_scale)
    assert len(scales) == num_parts
    assert scales[:-1] == [1.0] * (num_parts - 1)
    flat = [length for one in lengths for length in one]
    expected = aggregation(flat, [2] * len(lengths))
    total = [length * weight * scales[-1] for length, weight in zip(flat, weights, strict=True)]
    assert total == pytest.approx([length * weight for length, weight in zip(flat, expected, strict=True)])


class Odd(Aggregation):
    """A user's own, without a divisor."""

    def __call__(self, lengths, group_sizes):
        return [1.0 for _ in lengths]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(advantage=GlobalMeanStd()), "data.advantage=GlobalMeanStd: the advantages of a group depend on"),
        (dict(micro_batches_per_step=5), "data.micro_batches_per_step=5.*data.groups_per_step=4"),
        (dict(aggregation=Odd()), "data.aggregation=Odd"),
        (dict(replay=ReplayBuffer(0.5, 100, 4)), "data.replay"),
    ],
)
def test_what_cannot_be_streamed_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_data(stream_groups=True, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_run_stopped_within_a_step_begins_it_again(tmp_path, stream):
    trained: list[int] = []

    class Watch(pl.Callback):
        def __init__(self, stop_at: int) -> None:
            self.stop_at = stop_at

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (batch_idx + 1) % 4 == 0:
                trained.extend(group.index for group in trainer.datamodule.last_step_groups)
            if batch_idx == self.stop_at:
                signal.raise_signal(signal.SIGTERM)

    def data():
        return make_data(max_staleness=0, stream_groups=stream, micro_batches_per_step=4, engine=barrier_engine())

    save, ends = SaveOnSigterm(), []
    with pytest.raises(SIGTERMException):
        fit(make_module(), data(), 5, [Watch(9), save], default_root_dir=tmp_path, enable_checkpointing=True)
    for path in (save.path, None):
        module = make_module()
        trainer = fit(module, data(), 5, [Watch(-1)], ckpt_path=path)
        ends.append((parameters(module), trainer.global_step, module.version))
        if path is not None:
            assert sorted(trained) == list(range(20)), "each once"
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert [step for _, step, _ in ends] == [version for _, _, version in ends] == [5, 5]
    torch.testing.assert_close(ends[0][0], ends[1][0], atol=1e-4, rtol=0)

"""How often a prompt is sampled follows from its measured pass rate, also after a resume."""

import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.prompts.curriculum import DifficultyWindow, HardestFirst, Learnability, PassRates
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.tasks import SortDigits


def test_prompts_are_sampled_as_often_as_their_pass_rate_says():
    source, rates = SortDigits(8, size=4), PassRates()
    for number, rate in enumerate([0.0, 0.5, 1.0]):
        rates.measure(number, rate)  # number 3 was never measured
    for curriculum, chances in (
        (Learnability(floor=0.2), [0.2, 1.0, 0.2, 1.0]),
        (HardestFirst(floor=0.2), [1.0, 0.5, 0.2, 1.0]),
        (DifficultyWindow(0.1, 0.9, floor=0.2), [0.2, 1.0, 0.2, 1.0]),
    ):
        stream = PromptStream(source, seed=1)
        taken = [stream.number_at(curriculum.advance(stream, rates)) for _ in range(2000)]
        epochs = stream.position / 4
        for number, chance in enumerate(chances):
            assert taken.count(number) / epochs == pytest.approx(chance, abs=0.06)


def test_a_window_holds_its_bounds():
    assert [DifficultyWindow(0.25, 0.75, floor=0.5).chance(rate) for rate in (0.2, 0.25, 0.75, 0.8)] == [0.5, 1, 1, 0.5]


def test_what_is_skipped_depends_on_seed_and_position():
    rates, source = PassRates(), SortDigits(8, size=1)
    rates.measure(0, 0.5)

    def positions(seed):
        stream = PromptStream(source, seed=seed)
        return [HardestFirst().advance(stream, rates) for _ in range(40)]

    assert positions(1) == positions(1)
    assert positions(1) != positions(2)


def test_pass_rates_follow_the_newest_groups_and_survive_a_checkpoint():
    rates = PassRates(smoothing=0.25)
    for new in (1.0, 0.0, 0.0):
        rates.measure(7, new)
    assert rates.of(7) == 0.5625
    assert rates.of(1) is None
    other = PassRates()
    other.load_state_dict(rates.state_dict())
    assert other.of(7) == 0.5625
    assert len(other) == 1


@pytest.mark.slow
def test_a_curriculum_is_repeated_to_the_bit_also_over_a_resume(tmp_path):
    def run(callbacks=None, **trainer):
        curriculum = Learnability(floor=0.05)
        source = SortDigits(8, size=24)
        data = make_data(
            prompts=source, curriculum=curriculum, schedule="fixed_lag", max_staleness=1, engine=barrier_engine()
        )
        module = make_module(learning_rate=3e-4)
        fit(module, data, 12, callbacks, **trainer)
        return module, data

    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    whole, data = run([saving], enable_checkpointing=True)
    assert data.stream.position > 12 * 4 + 4, "nothing was skipped"
    resumed, _ = run(ckpt_path=str(tmp_path / "step=7.ckpt"))
    assert torch.equal(parameters(whole), parameters(resumed))

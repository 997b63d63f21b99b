"""StalenessController on whole runs: rewards count when they arrive, and a rollback discards what it has to."""

import re
import threading
from statistics import fmean

import pytest
import torch
from controlled_runs import GOOD_GROUPS, LAG, STEPS, controlled
from flow import fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lit_async_rl as rl
from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.intake import DISCARDED, ROLLED_BACK

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a rollback, its tape and its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *controlled(others=[RolloutTape(str(folder / "tape")), saver(folder)])


def saver(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)


def rollback_of(controller):
    """The step of the rollback, and the last version that it keeps."""
    (report,) = [words for words in controller.reports if "rolled back to those" in words]
    numbers = re.search(r"at step (\d+).* after step (\d+)\. What versions after (\d+)", report).groups()
    return int(numbers[0]), int(numbers[2])


@pytest.mark.slow
def test_a_fall_is_seen_when_it_arrives_and_not_when_it_is_trained_on(whole):
    _, controller, *_ = whole
    came, _ = rollback_of(controller)
    # version v samples groups 2 v + 4 and 2 v + 5: with 12 good ones the first bad version is 4, trained on in step 6
    first_bad = (GOOD_GROUPS - 2 * LAG) // 2
    assert came == first_bad + 2, "at the end of step 5, which counts from 0 and waits for all versions before 5"
    assert came == first_bad + LAG, "and none of it was trained on yet"


def test_nothing_is_trained_on_that_a_discarded_version_sampled_and_it_is_counted(whole):
    _, controller, trained, _, data = whole
    came, kept = rollback_of(controller)
    assert kept == 3, "a copy is taken in the step after a checkpoint"
    assert trained.versions[:came] == [{max(0, step - LAG)} for step in range(came)]
    assert trained.versions[came:] == [{came}] * (STEPS - came), "of the restored policy, as at the beginning"
    fate = data.stats().fates[DISCARDED]
    assert fate.num_groups == 2 * LAG, "two groups of each version that was under way"
    assert data.stats().dropped_tokens[ROLLED_BACK] == fate.length * 2, "of two rollouts each"


def test_the_correction_is_the_first_rung_and_the_configured_loss_comes_back_at_the_end(whole):
    _, controller, trained, module, _ = whole
    came, _ = rollback_of(controller)
    assert trained.is_corrected == [False] * came + [True] * (STEPS - came)
    words = (
        "the loss is corrected by SequenceTruncatedIS(cap=8.0, floor=0.0) and the learning rate is multiplied by 0.5"
    )
    assert words in controller.reports[1]
    assert controller.lr_scale == 0.5
    assert module.objective.correction is None


@pytest.mark.parametrize("step", [3, 6])
def test_a_resumed_run_ends_with_the_same_bits(whole, step, tmp_path):
    folder, controller, _, module, _ = whole
    resumed, _, again, _ = controlled(ckpt_path=folder / f"step={step}.ckpt", others=[saver(tmp_path)])
    assert torch.equal(parameters(again), parameters(module))
    assert resumed.reports == controller.reports


def test_a_tape_replays_it(whole, tmp_path):
    folder, controller, _, module, _ = whole
    replayed, _, again, _ = controlled(tape=str(folder / "tape"), others=[saver(tmp_path)])
    assert replayed.reports == controller.reports
    assert torch.equal(parameters(again), parameters(module))


def test_a_version_counts_when_all_of_its_groups_are_scored():
    """A quick group would stand for its version: here those of prompt 5 wait until step 4."""
    release = threading.Event()
    taken = []

    def reward(prompt, completion):
        if prompt.answer == "5":
            release.wait(20)
        return float(prompt.answer)

    class Take(Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.datamodule.watch_rewards()

        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 3:
                assert not taken, "version 0 lacks a group"
                release.set()
            taken.extend(trainer.datamodule.take_rewards())

    prompts = [{"prompt": f"{n + 100:08d}=", "answer": str(n)} for n in range(400)]
    data = make_data(prompts=prompts, shuffle=False, reward=reward, groups_per_step=1, group_size=2, max_staleness=5)
    fit(make_module(), data, 9, [Take()])
    assert taken[0] == fmean(range(6)), "the six groups of version 0"
    assert taken[1:] == [float(n) for n in range(6, 6 + len(taken) - 1)]


def test_stored_completions_of_discarded_versions_are_not_replayed():
    buffer = ReplayBuffer(0.5)
    data = make_data(replay=buffer, max_staleness=0)
    fit(make_module(), data, 4)
    assert {stored.version for stored in all_stored(buffer)} > {0, 1}
    buffer.discard_after(1)
    assert {stored.version for stored in all_stored(buffer)} == {0, 1}


def all_stored(buffer):
    return [stored for rollouts in buffer._prompts.values() for stored in rollouts.values()]


@pytest.mark.parametrize("loss", [rl.PPOClip(), rl.Reinforce()])
def test_a_loss_that_corrects_itself_has_no_such_rung(loss):
    controller = rl.StalenessController(limit=-1e9, cooldown_steps=1, min_staleness=None)
    controller.forecast.MIN_STEPS = 2
    module = make_module(loss=loss)
    fit(module, make_data(max_staleness=1), 4, [controller])
    is_corrected = "corrected by" in controller.reports[0]
    assert is_corrected == isinstance(loss, rl.Reinforce)
    assert ("multiplied" in controller.reports[0]) != is_corrected

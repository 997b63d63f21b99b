"""The tape: a replay is the run again, other choices see the same data, damage is noticed, nothing is lost."""

import errno
import logging
import runpy
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from disk import full_disk
from filelock import FileLock
from flow import fit, make_data, make_module, parameters
from groups import group
from test_resume import Watch, saving

from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.lab import tape as tape_command
from lit_async_rl.losses import Reinforce
from lit_async_rl.replay import tape as tape_writer
from lit_async_rl.replay.tape import Tape, TapeStep, TapeWriter
from lit_async_rl.replay.tape_source import Replay
from lit_async_rl.runtime.files import lock_path
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead
from lit_async_rl.scheduling.admission import FromTape

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 20 steps in two micro-batches, its tape and its final weights."""
    folder = tmp_path_factory.mktemp("tape")
    module, watch = make_module(), Watch()
    settings = dict(max_staleness=2, groups_per_step=2, micro_batches_per_step=2)
    fit(module, make_data(**settings), 20, [watch, RolloutTape(str(folder), every_n_steps=3)])
    return folder, parameters(module).clone(), watch.trained


def replay(folder, **changes):
    changes = dict(groups_per_step=2, micro_batches_per_step=2, max_staleness=2) | changes
    return make_data(tape=str(folder), **changes)


@pytest.mark.slow
def test_a_replay_is_bit_for_bit_the_recorded_run(recorded):
    folder, expected, trained = recorded
    module, watch = make_module(), Watch()
    fit(module, replay(folder), 20, [watch])
    assert torch.equal(parameters(module), expected)
    assert watch.trained == trained


@pytest.mark.slow
def test_another_loss_sees_the_same_data_and_the_run_ends_with_the_tape(recorded, caplog):
    folder, expected, trained = recorded
    module, watch = make_module(loss=Reinforce()), Watch()
    with caplog.at_level(logging.WARNING):
        trainer = fit(module, replay(folder, max_staleness=5), 30, [watch])
    assert trainer.global_step == 20
    assert "the tape has ended" in caplog.text
    assert sorted(set(watch.trained)) == sorted(set(trained))
    assert not torch.equal(parameters(module), expected)


def test_groups_of_one_step_have_indices_of_their_own():
    """Recorded steps that share a prompt of the replay buffer share its index, and a larger step has both."""
    recorded = [TapeStep(step, step, (group([1.0, 0.0], index=5), group([0.0, 1.0], index=6))) for step in range(3)]
    tape = Mock(spec=Tape, steps=lambda first: iter(recorded[first:]))
    source = Replay(tape, 0, FromTape("").make(4, 1))
    source.start(0)
    for expected in ([5, 6, 7, 8], [5, 6]):
        source.begin_step()
        assert [source.take().index for _ in expected] == expected


def stale(folder, *staleness):
    """A tape with a step a file, each of one group of that age."""
    writer = TapeWriter(folder)
    for step, age in enumerate(staleness):
        writer.append(step, age, [group([0.0, 1.0], [2, 3])])  # sampled by version 0
        writer.flush()
    writer.close(1.0)
    return folder


def test_a_tape_with_older_tokens_than_the_bound_is_replayed_and_the_first_step_named(tmp_path, caplog):
    """They were trained on without a word; a tape of `data.replay`, or of a bound that fell, has such steps."""
    folder = stale(tmp_path / "tape", 0, 1, 2, 2, 0)
    assert fit(make_module(), replay(folder, max_staleness=2), 5).global_step == 2
    assert "is not the bound" not in caplog.text
    assert fit(make_module(), replay(folder, max_staleness=1), 5).global_step == 2
    (said,) = [one.getMessage() for one in caplog.records if "is not the bound" in one.getMessage()]
    assert said.startswith("data.max_staleness=1 is not the bound of tape ")
    assert said.endswith("its step 2 was trained on tokens 2 versions old, as this run will be")


@pytest.mark.slow
def test_a_resumed_replay_goes_on_at_its_step(recorded, tmp_path):
    folder, expected, _ = recorded
    fit(make_module(), replay(folder), 7, [saving(tmp_path)], enable_checkpointing=True)
    module = make_module()
    fit(module, replay(folder), 20, ckpt_path=str(tmp_path / "step=7.ckpt"))
    assert torch.equal(parameters(module), expected)


def test_a_damaged_tape_ends_in_a_clear_message(recorded, tmp_path):
    folder, *_ = recorded
    file = sorted(folder.glob("*.arrow"))[2]
    data = bytearray(file.read_bytes())
    for damaged in (data[:-7], data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]):
        (tmp_path / file.name).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{file.name} was damaged"):
            list(Tape(tmp_path).steps())
    with pytest.raises(FileNotFoundError, match="holds no tape"):
        Tape(tmp_path / "nowhere")


def test_steps_that_an_interruption_undid_are_set_aside(recorded, tmp_path):
    folder, *_ = recorded
    writer = TapeWriter(tmp_path)
    for step in Tape(folder).steps():
        writer.append(step.step, step.version, step.groups)
        writer.flush()
    TapeWriter(tmp_path, first_step=17)
    assert [step.step for step in Tape(tmp_path).steps()] == list(range(17))
    assert len(list(tmp_path.glob("*.undone"))) == 3, "they are still there"


def test_a_full_disk_loses_no_step(recorded, tmp_path, caplog):
    folder, *_ = recorded
    writer, steps = TapeWriter(tmp_path), list(Tape(folder).steps())
    writer.append(steps[0].step, steps[0].version, steps[0].groups, steps[0].sampling)
    with full_disk(), caplog.at_level(logging.WARNING):
        writer.flush()
    assert "the disk is full" in caplog.text
    writer.append(steps[1].step, steps[1].version, steps[1].groups, steps[1].sampling)
    writer.flush()
    assert list(Tape(tmp_path).steps()) == steps[:2]


def test_the_script_lists_filters_samples_and_plots(recorded, tmp_path, capsys, monkeypatch):
    folder, *_ = recorded

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tape.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "scripts/tape.py"), run_name="__main__")
        return capsys.readouterr().out

    assert "20 steps, 40 groups, 160 rollouts" in run("list", folder)
    assert "0 steps" not in run("filter", folder, "--out", tmp_path / "part", "--first_step", 5, "--last_step", 9)
    assert [step.step for step in Tape(tmp_path / "part").steps()] == [5, 6, 7, 8, 9]
    assert "reward" in run("sample", folder, "--num", 2)
    run("plot", folder, "--out", tmp_path / "tape.png")
    assert (tmp_path / "tape.png").stat().st_size > 10_000


def test_a_filter_that_a_full_disk_ends_says_so_and_not_that_all_is_written(recorded, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tape_command, "CLOSE_S", 0.2)
    with full_disk(), pytest.raises(SystemExit, match="the disk was full"):
        tape_command.main(["filter", str(recorded[0]), "--out", str(tmp_path / "part")])
    assert "written" not in capsys.readouterr().out


def test_the_list_has_at_most_twenty_steps(tmp_path, recorded, capsys):
    writer = TapeWriter(tmp_path)
    (first, *_) = Tape(recorded[0]).steps()
    for number in range(39):
        writer.append(number, number, first.groups[:1], first.sampling)
    writer.close(10.0)
    tape_command.main(["list", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.split()[0].isdigit()]
    assert len([row for row in rows if row.split()[0] == row.split()[1]]) == 20


def test_rows_that_a_full_disk_did_not_take_come_back_with_the_checkpoint(recorded, tmp_path):
    steps = [step.groups[:1] for step in Tape(recorded[0]).steps()]
    first = TapeWriter(tmp_path)
    first.append(0, 0, steps[0])
    first.flush()
    with full_disk(10):
        for step in (1, 2):
            first.append(step, step, steps[step])
            first.flush()
    in_checkpoint = first.unwritten_rows
    assert {row["step"] for row in in_checkpoint} == {1, 2}
    first.append(3, 3, steps[3])
    first.flush()  # one file with steps 1 to 3, before the run is killed and resumes after step 2
    TapeWriter(tmp_path, 3, in_checkpoint).flush()
    assert [step.step for step in Tape(tmp_path).steps()] == [0, 1, 2]
    TapeWriter(tmp_path, 2).flush()
    assert [(step.step, len(step.groups)) for step in Tape(tmp_path).steps()] == [(0, 1), (1, 1)]


def test_the_end_of_training_waits_for_room_and_ends_in_an_error_without(recorded, tmp_path):
    steps = list(Tape(recorded[0]).steps())
    writer = TapeWriter(tmp_path)
    writer.append(steps[0].step, steps[0].version, steps[0].groups, steps[0].sampling)
    with full_disk(), pytest.raises(OSError, match=r"full_disk_timeout_s=0: steps 0 to 0 are not on the tape"):
        writer.close(0.0)
    with full_disk():
        closing = threading.Thread(target=writer.close, args=(30.0,))
        closing.start()
        time.sleep(0.5)
        assert closing.is_alive()
    closing.join(10)
    assert list(Tape(tmp_path).steps()) == steps[:1]


def test_a_run_that_failed_leaves_its_folder_to_other_processes(tmp_path):
    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(make_module(), make_data(groups_per_step=2), 5, [RolloutTape(str(tmp_path)), Failing()])
    assert [step.step for step in Tape(tmp_path).steps()] == [0, 1]
    with FileLock(lock_path(tmp_path.resolve())).acquire(timeout=0):  # as another process would
        pass


def test_a_file_that_the_manifest_had_no_room_for_is_listed_later(recorded, tmp_path, monkeypatch):
    steps = list(Tape(recorded[0]).steps())
    writer, add = TapeWriter(tmp_path), tape_writer.add_to_manifest

    def full(*args):
        raise OSError(errno.ENOSPC, "no space left")

    writer.append(0, 0, steps[0].groups)
    writer.flush()
    monkeypatch.setattr(tape_writer, "add_to_manifest", full)
    for step in (1, 2):
        writer.append(step, step, steps[step].groups)
        writer.flush()
    with pytest.raises(OSError, match="steps 1 to 2 are not on the tape"):
        writer.close(0.0)
    monkeypatch.setattr(tape_writer, "add_to_manifest", add)
    writer.append(3, 3, steps[3].groups)
    writer.flush()
    assert [step.step for step in Tape(tmp_path).steps()] == [0, 1, 2, 3]


def test_rows_with_recorded_distributions_wait_in_a_checkpoint_that_can_be_loaded(recorded, tmp_path):
    (found, *_) = next(Tape(recorded[0]).steps()).groups
    rollouts = []
    for rollout in found.rollouts:
        n = len(rollout.token_ids)
        head = SamplerHead(torch.rand(n), torch.randint(9, (n, 2), dtype=torch.int32), -torch.rand(n, 2))
        rollouts.append(replace(rollout, head=head, experts=ExpertChoices(torch.zeros(n, 2, 1, dtype=torch.int16))))
    writer = TapeWriter(tmp_path / "tape")
    writer.append(0, 0, [replace(found, rollouts=tuple(rollouts))])
    torch.save(writer.unwritten_rows, tmp_path / "rows.pt")
    writer.release()
    again = TapeWriter(tmp_path / "again", 1, torch.load(tmp_path / "rows.pt", weights_only=True))
    again.flush()
    (step,) = Tape(tmp_path / "again").steps()
    for read, written in zip(step.groups[0].rollouts, rollouts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(read.head.tensors, written.head.tensors, strict=True))
        assert torch.equal(read.experts.experts, written.experts.experts)


def test_a_tape_that_is_trained_from_is_not_recorded_on(recorded, tmp_path):
    """With the recorded configuration and its `RolloutTape`, all steps were set aside before they were read."""
    folder = recorded[0]
    (tmp_path / "same").symlink_to(folder)
    data = make_data(tape=str(folder), max_staleness=2, groups_per_step=2, micro_batches_per_step=2)
    with pytest.raises(
        ValueError, match=r"RolloutTape\.folder=.*same' is the tape that data\.admission=FromTape trains"
    ):
        fit(make_module(), data, 2, [RolloutTape(str(tmp_path / "same"))])
    assert len(list(Tape(folder).steps())) == 20

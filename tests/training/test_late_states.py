"""Optimizer states of a checkpoint, which are copied after `save_checkpoint` has returned."""

import contextlib
import copy
import threading

import pytest
import torch
from test_background_io import state
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lit_async_rl.training import checkpoint_io as background_io
from lit_async_rl.training.checkpoint_io import BackgroundCheckpointIO


def test_optimizer_states_are_copied_before_the_next_step_and_not_while_saving(tmp_path, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer, begun, may_go_on = torch.optim.AdamW([weight]), threading.Event(), threading.Event()
    copied = background_io._copy_unchanged

    def slow(*args, **kwargs):
        begun.set()
        assert may_go_on.wait(60)
        return copied(*args, **kwargs)

    def step():
        weight.grad = torch.randn(1000)
        optimizer.step()

    step()
    monkeypatch.setattr(background_io, "_copy_unchanged", slow)
    io, expected = BackgroundCheckpointIO(), copy.deepcopy(optimizer.state_dict())
    io.save_checkpoint(state(1.0) | {"optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt")
    assert begun.wait(60)
    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive(), "the step changes what is not copied yet"
    may_go_on.set()
    stepping.join(60)
    step()
    io.teardown()
    (found,) = io.load_checkpoint(tmp_path / "a.ckpt")["optimizer_states"]
    assert found["param_groups"] == expected["param_groups"]
    for name, value in expected["state"][0].items():
        assert torch.equal(found["state"][0][name], value)
        assert not torch.equal(optimizer.state_dict()["state"][0][name], value)
    assert not _global_optimizer_pre_hooks


def test_states_that_something_else_changes_meanwhile_are_not_written(tmp_path, monkeypatch):
    moments = torch.ones(10)
    copied = background_io._copy

    def disturbed(value, known, staged):
        made = copied(value, known, staged)
        if isinstance(value, dict) and "optimizer_states" in value:
            moments.mul_(2)
        return made

    monkeypatch.setattr(background_io, "_copy", disturbed)
    io, old, new = BackgroundCheckpointIO(), tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    io.save_checkpoint(state(1.0), old)
    io.wait()
    io.save_checkpoint(state(2.0) | {"optimizer_states": [{"state": {0: {"exp_avg": moments}}}]}, new)
    with pytest.raises(RuntimeError, match="optimizer states changed outside an optimizer step"):
        io.wait()
    for end in (lambda: io.remove_checkpoint(old), io.teardown):
        with contextlib.suppress(RuntimeError):
            end()
    assert old.exists()
    assert not new.exists()


def test_a_checkpoint_without_optimizer_states_gets_none(tmp_path):
    io = BackgroundCheckpointIO()
    io.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt").keys() == state(1.0).keys()
    io.teardown()

"""Every optimizer step is made of exactly its micro-batches, also after resumes from checkpoints of any trigger."""

from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from test_resume import Watch

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.errors import StalenessError, StepError
from lit_async_rl.tasks import SortDigits

pytestmark = pytest.mark.slow


def fixed_lag(micro_batches, **changes):
    settings = dict(schedule="fixed_lag", max_staleness=1, groups_per_step=2, group_size=3)
    return make_data(**(settings | changes), micro_batches_per_step=micro_batches, engine=barrier_engine())


TRIGGERS = {
    "steps": dict(every_n_train_steps=1),
    "time": dict(train_time_interval=timedelta(0)),
}


@pytest.mark.parametrize(("micro_batches", "trigger"), [(1, "time"), (2, "steps"), (2, "time"), (3, "steps")])
def test_a_second_resume_is_bit_for_bit_the_unbroken_run(tmp_path, micro_batches, trigger):
    whole, watch = make_module(), Watch()
    fit(whole, fixed_lag(micro_batches), 5, [watch])
    path, module = None, make_module()
    for until in (3, 4, 5):  # each of them begins where the one before wrote its first file: within a step
        module, folder, seen = make_module(), tmp_path / str(until), Watch()
        saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **TRIGGERS[trigger])
        fit(module, fixed_lag(micro_batches), until, [seen, saves], ckpt_path=path, enable_checkpointing=True)
        assert max(staleness for *_, staleness in seen.trained) <= 1
        path = str(min(folder.glob("step=*.ckpt"), key=lambda file: file.stat().st_mtime_ns))
    assert torch.equal(parameters(module), parameters(whole))


HOOKS = (
    *("on_train_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_end"),
)


ONCE = ("on_before_zero_grad", "on_before_optimizer_step")  # in each step, not in each micro-batch


class SaveAt(pl.Callback):
    """Saves once, at the n-th call of a hook."""

    def __init__(self, hook, number, path):
        self.left, self.path = number, path
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        self.left -= 1
        if self.left == 0 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module")
def unbroken():
    module = make_module()
    fit(module, fixed_lag(2), 4)
    return parameters(module)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("number", [3, 4])
def test_a_checkpoint_that_a_callback_saves_in_any_hook_is_one_to_resume_from(tmp_path, hook, number, unbroken):
    path, validation = tmp_path / "it.ckpt", dict(val_prompts=SortDigits(8, size=2), val_sampling=SamplingParams())
    checked = dict(val_check_interval=1, check_val_every_n_epoch=None, limit_val_batches=1) if "val" in hook else {}
    number = 1 if hook == "on_train_start" else number - 1 if hook in ONCE else number
    save = SaveAt(hook, number, path)
    fit(make_module(), fixed_lag(2, **(validation if checked else {})), 3, [save], **checked)
    resumed = make_module()
    fit(resumed, fixed_lag(2), 4, ckpt_path=str(path))
    assert torch.equal(parameters(resumed), unbroken)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_gone_when_weights_are_published_and_activations_are_made(micro_batches, monkeypatch):
    """The largest of gradients, activations and an update's copy counts, not their sum."""
    module, seen = make_module(), {"published": [], "forward": []}
    publish = module.stream_weights

    def count(when):
        seen[when].append(sum(p.grad is not None for p in module.parameters()))

    def counted(*args, **kwargs):
        count("published")
        return publish(*args, **kwargs)

    monkeypatch.setattr(module, "stream_weights", counted)
    fit(module, fixed_lag(micro_batches), 3, [LambdaCallback(on_train_batch_start=lambda *_: count("forward"))])
    number = sum(1 for _ in module.parameters())
    assert seen["published"] == [0] * len(seen["published"])
    assert len(seen["published"]) >= 3
    assert seen["forward"] == [0, *[number] * (micro_batches - 1)] * 3  # other micro-batches add to those of the step


def test_a_data_module_serves_a_second_fit_which_begins_anew():
    data, first, second = fixed_lag(2), Watch(), Watch()
    module, again = make_module(), make_module()
    fit(module, data, 3, [first])
    fit(again, data, 3, [second])
    assert first.trained == second.trained
    assert torch.equal(parameters(module), parameters(again))


def test_a_resume_with_fewer_steps_than_were_made_ends_at_once(tmp_path):
    path = tmp_path / "it.ckpt"
    fit(make_module(), fixed_lag(2), 2, [SaveAt("on_train_end", 1, path)])
    trainer = fit(make_module(), fixed_lag(2), 1, [seen := Watch()], ckpt_path=str(path))
    assert trainer.global_step == 2
    assert not seen.trained


def test_a_loader_that_is_cut_off_within_a_step_is_refused():
    with pytest.raises(StepError, match=r"got only 1 of its 2 micro-batches.*limit_train_batches to a multiple"):
        fit(make_module(), fixed_lag(2), 4, limit_train_batches=3)


def test_a_token_beyond_the_bound_of_its_row_ends_the_run(monkeypatch):
    monkeypatch.setattr("lit_async_rl.data.rollout_source.check_bound", lambda *_: None)
    data = fixed_lag(2)
    make = data._source.collate
    data._source.collate = lambda *a, **k: [b.replace(max_staleness=b.max_staleness * 0) for b in make(*a, **k)]
    with pytest.raises(StalenessError, match=r"token .* sampled by policy version 0, .* version 1 .* max_staleness=0"):
        fit(make_module(), data, 4)

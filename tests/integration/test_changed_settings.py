"""A resumed run has the settings of its command, and the totals of the whole run."""

from functools import partial

import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback

from lit_async_rl.callbacks import ThroughputMonitor
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.resume import _ANSWERS, _changed_settings


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "last.ckpt"
    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    fit(make_module(weight_decay=0.0), make_data(), 1, [save])
    return path


@pytest.mark.slow
def test_weight_decay_and_betas_are_those_of_the_resumed_run(saved):
    found = []
    look = LambdaCallback(on_train_start=lambda trainer, _: found.append(trainer.optimizers[0].param_groups[0]))
    module = make_module(weight_decay=0.25, betas=(0.5, 0.75), learning_rate=1e-4)
    fit(module, make_data(), 2, [look], str(saved))
    assert (found[0]["weight_decay"], found[0]["betas"], found[0]["lr"]) == (0.25, (0.5, 0.75), 1e-4)


def test_another_optimizer_is_refused_by_name(saved):
    module = make_module(optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    with pytest.raises(ValueError, match=r"model\.optimizer=SGD has .*momentum.* checkpoint.s has .*betas"):
        fit(module, make_data(), 2, ckpt_path=str(saved))


def test_a_setting_whose_moments_the_checkpoint_lacks_is_refused_by_name(saved):
    module = make_module(optimizer=partial(torch.optim.AdamW, lr=1e-3, amsgrad=True))
    with pytest.raises(ValueError, match=r"the option amsgrad=True of model\.optimizer=AdamW needs optimizer moments"):
        fit(module, make_data(), 2, ckpt_path=str(saved))


class WithoutRandomState(EmbeddedEngine):
    """As vLLM's."""

    random_state, set_random_state = RolloutEngine.random_state, RolloutEngine.set_random_state


class OnGPU(EmbeddedEngine):
    """Its generator's state has 16 bytes, and accepts no other."""

    def random_state(self):
        return super().random_state()[:16]

    def set_random_state(self, state):
        raise RuntimeError("RNG state is wrong size")


@pytest.mark.parametrize("kind", [WithoutRandomState, OnGPU])
def test_a_run_goes_on_with_another_engine_or_device_and_its_random_numbers(saved, kind, caplog):
    assert torch.load(saved, weights_only=True)["RolloutDataModule"]["random_state"]
    assert fit(make_module(), make_data(engine=kind()), 2, ckpt_path=str(saved)).global_step == 2
    assert f"resume: data.engine={kind.__name__} cannot restore the random state in the checkpoint" in caplog.text


@pytest.mark.slow
def test_tokens_of_the_rollouts_in_a_checkpoint_are_counted(tmp_path):
    counts = {}
    for name, steps, path in (("whole", 4, None), ("first", 2, None), ("second", 4, tmp_path / "first.ckpt")):
        to = tmp_path / f"{name}.ckpt"
        save = LambdaCallback(on_train_end=lambda trainer, _, to=to: trainer.save_checkpoint(to))
        data = make_data(schedule="fixed_lag", max_staleness=1, engine=barrier_engine())
        fit(make_module(), data, steps, [ThroughputMonitor(), save], path and str(path))
        callbacks = torch.load(to, weights_only=True)["callbacks"]
        counts[name] = callbacks["ThroughputMonitor"]["total_tokens"]
    assert counts["first"] < counts["second"] == counts["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 2])
def test_groups_of_an_optimizer_have_the_settings_that_they_were_given_fresh_and_resumed(tmp_path, num_groups):
    """Those of a single group were the optimizer's defaults; several keep the checkpoint's."""

    def grouped(weight_decay):
        def make(parameters):
            cut = len(parameters) if num_groups == 1 else 1
            groups = [{"params": parameters[:cut], "weight_decay": weight_decay, "eps": 1e-6}]
            return torch.optim.AdamW([*groups, {"params": parameters[cut:]}][:num_groups], lr=1e-4)

        return make_module(optimizer=make)

    path, found = tmp_path / "grouped.ckpt", []

    def look(trainer, *_):
        found.append([(group["weight_decay"], group["eps"]) for group in trainer.optimizers[0].param_groups])

    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    watch = LambdaCallback(on_train_batch_start=look)
    fit(grouped(0.5), make_data(), 1, [save, watch])
    fit(grouped(0.25), make_data(), 2, [watch], str(path))
    defaults = [(0.01, 1e-8)][: num_groups - 1]
    resumed = 0.25 if num_groups == 1 else 0.5
    assert found == [[(0.5, 1e-6), *defaults], [(resumed, 1e-6), *defaults]]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_a_callback_sets_before_a_fresh_run_stays(num_groups):
    def grouped(parameters):
        cut = len(parameters) // num_groups
        groups = [{"params": parameters[:cut], "weight_decay": 0.5}, {"params": parameters[cut:]}]
        return torch.optim.AdamW(groups[:num_groups], lr=1e-4)

    def change(trainer, *_):
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.25

    def look(trainer, *_):
        found.append(trainer.optimizers[0].param_groups[0]["weight_decay"])

    found = []
    callback = LambdaCallback(on_train_start=change, on_train_batch_start=look)
    fit(make_module(optimizer=grouped), make_data(), 1, [callback])
    assert found == [0.25]


class Counting(torch.optim.AdamW):
    """Keeps state among its settings, as schedule-free optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-4)
        self.defaults["k"] = self.param_groups[0]["k"] = 0

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        return super().step(closure)


@pytest.mark.slow
def test_state_among_the_settings_of_another_librarys_optimizer_stays(tmp_path):
    path, found = tmp_path / "counting.ckpt", []
    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    look = LambdaCallback(on_train_end=lambda trainer, _: found.append(trainer.optimizers[0].param_groups[0]["k"]))
    fit(make_module(optimizer=Counting), make_data(), 2, [save])
    fit(make_module(optimizer=Counting), make_data(), 3, [look], str(path))
    assert found == [3]


@pytest.mark.parametrize(
    ("saved", "now", "is_changed"),
    [("1", "1", False), ("1", "2", True), (None, "2", False), ("1", None, False)],
)
def test_other_answers_of_prompts_are_a_change_where_both_are_known(saved, now, is_changed):
    before, after = ({"data.sampling": {}, _ANSWERS: answers} for answers in (saved, now))
    changed, has_new_rewards = _changed_settings(before, after, keeps_rewards=False)
    assert (bool(changed), has_new_rewards) == (is_changed, is_changed)


def always(value, prompt, completion):
    return value


def everything(prompt, completion):
    return 1.0


SAMPLING = SamplingParams(max_tokens=10, head=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [dict(reward=everything), dict(reward=partial(always, 1.0)), dict(sampling=SAMPLING)]
)
def test_a_replay_buffer_of_other_rewards_or_recordings_begins_anew(changes, tmp_path, caplog):
    path, found = tmp_path / "replayed.ckpt", []
    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    settings = dict(groups_per_step=4, max_staleness=0, reward=partial(always, 0.0))
    fit(make_module(), make_data(**settings, replay=ReplayBuffer()), 3, [save])

    def look(trainer, module, outputs, batch, batch_idx):
        found.append([(r.reward, r.head is None) for g in trainer.datamodule.last_step_groups for r in g.rollouts])

    data = make_data(**settings | changes, replay=ReplayBuffer())
    fit(make_module(), data, 6, [LambdaCallback(on_train_batch_end=look)], str(path))
    assert len({pair for step in found for pair in step}) == 1
    assert len(found[0]) == 8 < len(found[1]), "the first has nothing to replay"
    assert "the checkpoint's replay buffer (" in caplog.text


def test_the_same_engine_goes_on_with_the_random_numbers_of_the_checkpoint(saved):
    restored = []

    class Recording(EmbeddedEngine):
        def set_random_state(self, state):
            restored.append(state.clone())
            super().set_random_state(state)

    fit(make_module(), make_data(engine=Recording(seed=5)), 2, ckpt_path=str(saved))
    (state,) = restored
    assert torch.equal(state, torch.load(saved, weights_only=True)["RolloutDataModule"]["random_state"]["engine"])

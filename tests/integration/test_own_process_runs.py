"""Training with the engine in a process of its own: the same run, and one that goes on when the process is killed."""

import os
import re
import signal

import lightning.pytorch as pl
import pytest
import torch
from failing_engines import Watch, said
from flow import barrier_engine, fit, make_data, make_module, parameters

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import EngineCheck
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.lora import LoRA
from lit_async_rl.tasks import Addition
from lit_async_rl.tasks.calculator import Calculator

LORA = LoRA(rank=2, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens"])


def trained(own_process, steps=6, ckpt_path=None, save=None):
    engine = barrier_engine(own_process=own_process, device="cpu")
    data = make_data(engine=engine, schedule="fixed_lag", max_staleness=2, micro_batches_per_step=2)
    module = make_module()
    fit(module, data, steps, [] if save is None else [Save(save)], ckpt_path=ckpt_path)
    return parameters(module)


class Save(pl.Callback):
    """Saves a checkpoint after three steps."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
def test_with_a_fixed_lag_the_weights_are_bit_for_bit_those_of_a_run_in_one_process():
    assert torch.equal(trained(False), trained(True))


@pytest.mark.slow
def test_merged_adapters_arrive():
    data = make_data(engine=EmbeddedEngine(own_process=True, device="cpu"), max_staleness=0)
    trainer = fit(make_module(lora=LORA, learning_rate=1e-2), data, 4, [EngineCheck()])
    assert float(trainer.callback_metrics["engine/logprob_error"]) < 1e-5


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path):
    whole = trained(True, save=tmp_path / "three.ckpt")
    assert torch.equal(whole, trained(True, ckpt_path=str(tmp_path / "three.ckpt")))
    assert torch.equal(whole, trained(False, ckpt_path=str(tmp_path / "three.ckpt")))


class Kill(pl.Callback):
    """Kills the engine's process after a step, or stops it."""

    def __init__(self, how) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2 and self.how is not None:
            os.kill(trainer.datamodule.engine.engine.connection.pid, self.how)
            self.how = None


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_replaced_and_nothing_is_lost(how, caplog):
    engine = EmbeddedEngine(own_process=True, device="cpu", update_timeout_s=2.0)
    data, watch = make_data(engine=engine, groups_per_step=2, max_staleness=2, rollout_timeout_s=2.0), Watch()
    module = make_module()
    fit(module, data, 6, [watch, Kill(how)])
    assert module.version == 6
    assert len(set(watch.trained)) == len(watch.trained) == 12
    (line,) = said(caplog, "(restarts in a row: 1; limit: data.limits.engine_restarts=3)")
    assert ("SIGKILL" if how == signal.SIGKILL else "StalledError") in line


@pytest.mark.slow
def test_episodes_of_several_turns_are_generated_there_too():
    engine = EpisodeEngine(EmbeddedEngine(own_process=True, device="cpu"), environment=Calculator())
    model, prompts = asset("calculator_policy"), Addition(num_digits=3, size=100)
    data = make_data(model=model, engine=engine, prompts=prompts, reward=None, max_staleness=1)
    module = make_module(model=model)
    fit(module, data, 3)
    assert module.version == 3


COMMAND = [
    *("--config", "configs/quickstart.yaml", "--config", "configs/own_process.yaml"),
    *("--data.groups_per_step", "4", "--data.group_size", "4", "--data.micro_batches_per_step", "2"),
    *("--trainer.max_steps", "4", "--trainer.val_check_interval", "4", "--data.validation.prompts.init_args.size", "8"),
]
FSDP2 = [
    *("--config", "configs/strategies/fsdp2.yaml", "--trainer.strategy.init_args.data_parallel_size", "2"),
    *("--trainer.accelerator", "cpu", "--trainer.devices", "2"),
]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow, id="one"),
        pytest.param(FSDP2, marks=pytest.mark.sweep, id="fsdp2"),
    ],
)
def test_the_overlay_trains_from_the_command_line(more, process, tmp_path):
    logs = ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    done = process.script("scripts/train.py", [*COMMAND, *more, *logs], tmp_path, limit_s=170)
    said = done.said
    assert done.status == 0, said
    assert re.search(r"optimizer steps\s*│ 4 ", said)
    assert "Traceback" not in said
    assert "engine/logprob_error" not in said, "the check of the engine has found something"

"""Training with replicas: the same run with one, every group once when one is killed, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time

import lightning.pytorch as pl
import psutil
import pytest
import torch
from failing_engines import Watch, said
from flow import barrier_engine, fit, make_data, make_module, parameters
from processes import wait_for_the_end_of

from lit_async_rl.callbacks import BottleneckVerdict, EngineCheck
from lit_async_rl.callbacks.monitors import bottleneck_verdict
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.lora import LoRA
from lit_async_rl.ray.engine import RayEngine

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # a busy machine starts processes slowly


def trained(engine, steps=6):
    data = make_data(engine=engine, schedule="fixed_lag", max_staleness=2, micro_batches_per_step=2)
    module = make_module()
    fit(module, data, steps)
    return parameters(module)


def test_with_one_replica_and_a_fixed_lag_the_weights_are_bit_for_bit_those_of_a_run_without_ray(ray_cluster):
    on_ray = RayEngine(barrier_engine(device="cpu"), replicas=1, num_cpus=0.1)
    assert torch.equal(trained(barrier_engine(device="cpu")), trained(on_ray))


class Kill(pl.Callback):
    """Kills a replica after a step, while it samples, and another while it gets the weights of a later step."""

    def __init__(self) -> None:
        self.pids = set()

    def on_train_batch_end(self, trainer, *args):
        engine = trainer.datamodule.engine
        self.pids |= set(engine.pids)
        if trainer.global_step == 2:
            os.kill(engine.pids[0], signal.SIGKILL)
        if trainer.global_step == 5:
            fleet = engine._fleet
            send = fleet._send_weights

            def killing(entry):
                send(entry)
                if entry.number == 1:
                    os.kill(entry.place["pid"], signal.SIGKILL)
                    fleet._send_weights = send

            fleet._send_weights = killing


def test_killed_replicas_cost_no_group_and_the_engine_is_not_restarted(ray_cluster, caplog):
    engine = RayEngine(EmbeddedEngine(device="cpu"), replicas=2, num_cpus=0.1)
    # a busy machine needs longer than half a minute until one of two killed replicas samples again
    settings = dict(groups_per_step=2, max_staleness=2, rollout_timeout_s=150.0)
    data, watch, kill = make_data(engine=engine, **settings), Watch(), Kill()
    module = make_module()
    fit(module, data, 10, [kill, watch])  # before the weights of the step go out
    assert module.version == 10
    assert len(set(watch.trained)) == len(watch.trained) == 20
    assert not said(caplog, "the engine was restarted")
    assert engine.num_lost == 2
    wait_for_the_end_of(*kill.pids)


class Freeze(pl.Callback):
    """Stops the process of a replica after step 2 until step 10; step 6 waits for the line that names it.

    A step lasts at least half a second, of which a busy machine's own weight sync is no share worth a word.
    """

    def __init__(self, caplog) -> None:
        self.caplog = caplog
        self.lines = []

    def on_train_batch_end(self, trainer, *args):
        time.sleep(0.5)
        pid = trainer.datamodule.engine.pids[1]
        if trainer.global_step == 2:
            os.kill(pid, signal.SIGSTOP)
        if trainer.global_step == 6:
            ends_at = time.monotonic() + 120
            while time.monotonic() < ends_at and not self.lines:
                self.lines = said(self.caplog, f"replica 1 (pid {pid}, ")
                time.sleep(0.1)
        if trainer.global_step == 10:
            os.kill(pid, signal.SIGCONT)


def test_while_a_replica_stands_still_the_run_goes_on_names_it_and_does_not_blame_the_weight_sync(
    ray_cluster, caplog, capsys, monkeypatch
):
    monkeypatch.setattr(bottleneck_verdict, "MIN_STEPS_FOR_VERDICT", 0)
    engine = RayEngine(EmbeddedEngine(device="cpu"), replicas=2, num_cpus=0.1)
    data, freeze, watch = make_data(engine=engine, groups_per_step=2, max_staleness=8), Freeze(caplog), Watch()
    fit(make_module(), data, 12, [watch, BottleneckVerdict(every_n_steps=2), freeze])
    assert "has sent no answer for 5 s, and the run may be waiting for this replica" in freeze.lines[0]
    assert len(set(watch.trained)) == len(watch.trained) == 24
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("whole run: ")]
    assert "the weight sync is the bottleneck" not in verdict
    assert engine.num_lost == 0


@pytest.mark.soak
def test_adapters_travel_as_factors_and_the_replica_merges_them(ray_cluster):
    lora = LoRA(rank=2, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens"])
    engine = RayEngine(EmbeddedEngine(device="cpu"), replicas=1, num_cpus=0.1)
    data = make_data(engine=engine, max_staleness=0)
    trainer = fit(make_module(lora=lora, learning_rate=1e-2), data, 4, [EngineCheck()])
    assert float(trainer.callback_metrics["engine/logprob_error"]) < 1e-5


COMMAND = [
    *(sys.executable, "scripts/train.py", "--config", "configs/quickstart.yaml"),
    *("--data.engine", "RayEngine", "--data.engine.replicas", "2", "--data.engine.num_cpus", "0.5"),
    *("--data.engine.engine.class_path", "EmbeddedEngine", "--data.engine.engine.init_args.num_slots", "16"),
    *("--data.groups_per_step", "4", "--data.group_size", "4", "--data.micro_batches_per_step", "2"),
    *("--trainer.val_check_interval", "4", "--data.validation.prompts.init_args.size", "8"),
]


@pytest.mark.soak
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_command_starts_ray_by_itself_and_leaves_nothing_behind_however_it_ends(is_killed, tmp_path):
    steps = "100000" if is_killed else "4"
    logs = ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.max_steps", steps]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen([*COMMAND, *logs], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
    children = {}
    deadline = time.monotonic() + 500
    while process.poll() is None:
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.2)
        try:
            for child in psutil.Process(process.pid).children(recursive=True):
                children[child.pid] = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if is_killed and sum("Replica" in name for name in children.values()) == 2:
            process.kill()
    process.wait(30)
    # Ray's own agents try for a minute to report the end to a store that has ended, too
    is_agent = re.compile(r"ray::\w*Agent|python.*agent(/main)?\.py")
    agents = {pid for pid, name in children.items() if is_agent.search(name[:200])}
    wait_for_the_end_of(*(children.keys() - agents))
    wait_for_the_end_of(*agents, seconds=120.0)
    assert any("raylet" in name for name in children.values())
    if not is_killed:
        text = (tmp_path / "out").read_text()
        assert process.returncode == 0, text
        assert re.search(r"optimizer steps\s*│ 4 ", text)
        assert "Traceback" not in text

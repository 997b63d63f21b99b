"""Every public callback through the same trials: on our own runs, all at once; on modules that know nothing of us."""

import pytest
import torch
from battery import SITUATIONS, discovered, everything, run
from flow import barrier_engine, parameters
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl import callbacks

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


def test_every_callback_of_the_package_is_public():
    assert set(discovered()) == set(callbacks.__all__)
    assert all(getattr(callbacks, name) is kind for name, kind in discovered().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "trajectory"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_our_runs(situation, kind, tmp_path):
    if (situation, kind) == ("one rollout", "trajectory"):  # its baseline is that of a group
        with pytest.raises(ValueError, match=r"TrajectoryBalance with data\.advantage=Raw"):
            run(tmp_path, kind, **SITUATIONS[situation])
        return
    run(tmp_path, kind, **SITUATIONS[situation])


# reproducible runs have a fixed lag, which these two refuse to change; the gradient that GAC compares with is not saved
FIXED_LAG = dict(schedule="fixed_lag", max_staleness=1)
NOT_THERE = frozenset({"AdaptiveStaleness", "StalenessController", "GradientAlignmentControl"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "trajectory"])
def test_a_run_with_all_of_them_resumes_bit_for_bit(kind, tmp_path):
    def half(name, max_steps, ckpt_path=None):
        used = everything(tmp_path / name, kind, without=NOT_THERE)
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        settings = dict(all_callbacks=used, others=[saver], engine=barrier_engine(), ckpt_path=ckpt_path)
        module, *_ = run(tmp_path / name, kind, max_steps, **settings, **FIXED_LAG)
        # one begins when the last has ended, one counts what was sampled, one has paths of the run's folder
        by_clock = {"Evaluation", "ThroughputMonitor"} | {c.state_key for c in used if isinstance(c, ModelCheckpoint)}
        timeless = [callback for callback in used if callback.state_key not in by_clock]
        return module, {callback.state_key: callback.state_dict() for callback in timeless}

    whole, expected = half("whole", 6)
    half("first", 3)
    resumed, states = half("rest", 6, str(tmp_path / "first/step=3.ckpt"))
    assert torch.equal(parameters(resumed), parameters(whole))
    assert states == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "trajectory"])
def test_one_set_of_them_serves_two_runs(kind, tmp_path):
    used = everything(tmp_path, kind, without=NOT_THERE)
    run(tmp_path, kind, 3, all_callbacks=used, engine=barrier_engine(), **FIXED_LAG)
    second, *_ = run(tmp_path, kind, 3, all_callbacks=used, engine=barrier_engine(), **FIXED_LAG)
    new = everything(tmp_path / "new", kind, without=NOT_THERE)
    fresh, *_ = run(tmp_path / "new", kind, 3, all_callbacks=new, engine=barrier_engine(), **FIXED_LAG)
    assert torch.equal(parameters(second), parameters(fresh))

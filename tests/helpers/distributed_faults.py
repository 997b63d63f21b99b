"""Run by two processes: sharded training whose engine, on rank 0, breaks once and hangs once."""

import logging
import os
import time

from flow import fit, make_data, make_module
from sharded_training import make_strategy

from lit_async_rl.engines.embedded.engine import EmbeddedEngine

FAILURES = ["hang", "crash"] if os.environ["RANK"] == "0" else []


class FailingEngine(EmbeddedEngine):
    """Fails when the first tokens were sampled, once in each of its first two lives."""

    def __init__(self, **settings):
        super().__init__(**settings)
        step = self.engine.step

        def failing_step():  # with the engine's lock held
            if self.num_tokens > 200 and FAILURES:
                if FAILURES.pop() == "hang":
                    time.sleep(1e6)
                raise KeyError("broken")
            return step()

        self.engine.step = failing_step


if __name__ == "__main__":
    logging.basicConfig()
    engine = FailingEngine(in_flight_weight_updates=False, update_timeout_s=4.0)
    data = make_data(engine=engine, max_staleness=0, schedule="fixed_lag", rollout_timeout_s=4.0, rank_timeout_s=20.0)
    module = make_module()
    fit(module, data, 8, strategy=make_strategy("fsdp2"), devices=2)
    print(f"versions {module.version}, failures left {FAILURES}")
    assert module.version == 8
    assert not FAILURES

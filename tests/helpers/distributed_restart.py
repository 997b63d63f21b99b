"""Run by two processes: the engine, on rank 0, restarts between two publications, and `EngineCheck` has to know.

Before the next step but one it asks for log-probabilities, which both ranks compute.
"""

import logging

from flow import fit, make_data, make_module

from lit_async_rl.callbacks import EngineCheck
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

FAILED = []
TAKEN = []


class FailingEngine(EmbeddedEngine):
    """Fails once between the publications of versions 1 and 2, before any completion of version 1 is trained on."""

    def poll(self, timeout_s):
        if data.trainer.global_step in (4, 5) and not FAILED:
            FAILED.append(True)
            raise KeyError("broken")
        return super().poll(timeout_s)

    uses_probe = True

    @property
    def needs_probe(self):
        return data.trainer.global_step == 7 and not TAKEN

    def take_probe(self, probe):
        TAKEN.append(probe.version)


if __name__ == "__main__":
    logging.basicConfig()
    engine = FailingEngine(in_flight_weight_updates=False, num_slots=2)
    data = make_data(engine=engine, schedule="fixed_lag", max_staleness=2, weight_sync_steps=3, rank_timeout_s=20.0)
    check = EngineCheck()
    trainer = fit(make_module(), data, 13, callbacks=[check], devices=2, strategy="ddp")
    print(f"failed {FAILED}, checked {check.num_checks}, log-probabilities of versions {TAKEN}")
    assert trainer.global_rank or (FAILED and TAKEN == [2])

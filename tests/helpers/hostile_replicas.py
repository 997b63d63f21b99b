"""An engine that does one wrong thing in one of several replicas, and after its restart the next of a list."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.weights import UNCHANGED


class HostileReplica(EmbeddedEngine):
    """Right in replica 0. Replica 1 takes the first line of a file, and does what it says from version 1 on.

    Args:
        faults: the file; each process takes a line from it.
        seed: its number, that of replica 0 is 0.
        **settings: of `EmbeddedEngine`.
    """

    def __init__(self, faults: str, seed: int = 0, **settings) -> None:
        super().__init__(seed=seed, **settings)
        self._faults = Path(faults)
        self._fault = ""
        self._newest = -1
        self._started_at = 0

    def setup(self, model):
        lines = self._faults.read_text().splitlines() if self.seed == 1 else []
        if lines:
            self._fault = lines[0]
            self._faults.write_text("\n".join(lines[1:]))
        super().setup(model)

    @property
    def _is_due(self) -> bool:
        return self._newest >= 1

    def load_weights(self, version, weights):
        if version >= 1 and self._fault == "weight missing" and not self.engine._has_weights:
            self._fault = "weight missing later"  # the first ones are all loaded, or nothing would be
        elif version >= 1 and self._fault == "weight missing later":
            weights = [(n, UNCHANGED if n == "model.norm.weight" else w) for n, w in weights]
        elif version >= 1 and self._fault == "update hangs":
            time.sleep(1e6)
        super().load_weights(version, weights)
        self._newest = version

    def submit(self, requests):
        if self._is_due and self._fault == "submit fails" and requests[0].id >= 0:
            raise RuntimeError("the scheduler is broken")
        super().submit(requests)

    def poll(self, timeout_s):
        found = super().poll(timeout_s)
        if not self._is_due or all(completion.request_id < 0 for completion in found):  # it proves to be right first
            return found
        match self._fault:
            case "old version":
                return [replace(c, versions=(0,) * len(c.versions)) for c in found]
            case "nonsense":
                return [42]
            case "hangs":
                time.sleep(1e6)
            case "exits":
                print("the driver of the accelerator has gone", flush=True)
                os._exit(7)
        return found

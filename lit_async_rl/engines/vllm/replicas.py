"""Several vLLM models of one trainer, each on GPUs of its own: servers that the trainer starts, on loopback.

The replicas are servers rather than threads of the trainer, because thousands of samples a second that are counted,
tagged and cut there would hold up its training. All of them read the same staged weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, set_up
from lit_async_rl.engines.vllm.background import check_can_sleep
from lit_async_rl.engines.vllm.engine import VLLMEngine
from lit_async_rl.engines.vllm.engine_arguments import FIXED_ARGUMENTS, check_vllm, is_cpu_build
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.replica_process import LOOK_S, MAX_RESTARTS, Replica
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import stored_dtype
from lit_async_rl.utils.checks import check_range

SET_BY_SERVE = (*FIXED_ARGUMENTS, "worker_extension_cls", "model")
log = logging.getLogger(__name__)


class ReplicaFleet(VLLMServerEngine):
    """Servers that the trainer starts itself, and starts again when they die.

    Args:
        replicas: not started yet.
        key: of their HTTP interface.
        settings: of `VLLMServerEngine`.
    """

    def __init__(self, replicas: Sequence[Replica], key: str, **settings: Any) -> None:
        self.replicas = replicas
        self._key = key
        super().__init__([replica.address for replica in replicas], **settings)
        self.name = f"the fleet of {len(replicas)} vLLM replicas"

    def setup(self, model: str) -> None:
        """Starts the replicas and waits for them.

        Raises:
            EngineError: one of them did not start.
        """
        for replica in self.replicas:
            replica.start()
        self._wait_until_they_listen()
        super().setup(model)

    def _wait_until_they_listen(self) -> None:
        """They do when their model is ready; one that has ended will never be."""
        deadline = time.monotonic() + self.startup_timeout_s
        for replica in self.replicas:
            while not replica.listens():
                if replica.exit_code is not None:
                    ended = f"ended with status {replica.exit_code} while it started"
                    raise EngineError(f"vLLM replica {replica.number} {ended} (its own messages are above)")
                if time.monotonic() > deadline:
                    limit = f"data.engine.startup_timeout_s={self.startup_timeout_s:g}"
                    raise StalledError(f"vLLM replica {replica.number} did not start within {limit}")
                time.sleep(LOOK_S)

    @property
    def _api_key(self) -> str:
        return self._key

    def _background(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [*super()._background(), self._supervise]

    async def _supervise(self) -> None:
        """Starts replicas again whose process has ended; the fleet brings them in when they answer."""
        loop = asyncio.get_running_loop()
        given_up = set[Replica]()
        while True:
            await asyncio.sleep(self.probe_interval_s)
            for replica in self.replicas:
                if replica.exit_code is None or replica in given_up:
                    continue
                why = f"its process ended with status {replica.exit_code}"
                self._fleet.take_out(f"http://{replica.address}", why)
                if replica.restart(loop.time()):
                    log.warning("vLLM replica %d (%s) is started again: %s", replica.number, replica.address, why)
                else:
                    given_up.add(replica)
                    log.warning("vLLM replica %d stays out, after %d restarts: %s", replica.number, MAX_RESTARTS, why)

    def close(self) -> None:
        """Stops the replicas; unblocks `poll` and `load_weights`."""
        super().close()
        for replica in self.replicas:
            replica.stop()


class VLLMReplicas(VLLMEngine):
    """Several vLLM models side by side on this machine, for a model that fits onto few GPUs.

    For a model that fits onto one GPU they are faster than tensor parallelism. They are processes that the trainer
    starts; one that dies is started again, and its requests are sampled again by others.

    Args:
        replicas: models, each on `tensor_parallel_size` GPUs.
        **settings: of `VLLMEngine`; without a transfer they share memory.

    Raises:
        ValueError: a setting is out of range, or refused.
    """

    uses_probe = True
    transfer: FileTransfer
    _fleet: ReplicaFleet | None = None

    def __init__(self, replicas: int = 2, **settings: Any) -> None:
        check_range("data.engine", "integer positive", replicas=replicas)
        super().__init__(**settings)
        self.replicas = replicas
        if not isinstance(self.transfer, FileTransfer):
            raise ValueError(
                f"data.engine.replicas={self.replicas} needs a transfer that all can read, SharedMemoryTransfer or "
                f"FileTransfer, got {type(self.transfer).__name__}"
            )
        gpus = self._arguments["device_ids"]
        needed = self.replicas * self._arguments["tensor_parallel_size"]
        if gpus is not None and len(gpus) != needed:
            raise ValueError(
                f"data.engine.device_ids={gpus} must name {needed} GPUs: replicas={self.replicas} times "
                f"tensor_parallel_size={self._arguments['tensor_parallel_size']}"
            )

    def setup(self, model: str) -> None:
        """Starts the replicas with the architecture of `model`; `load_weights` loads the weights."""
        check_vllm()
        check_can_sleep(self.sleep_level)
        key = secrets.token_hex(16)
        threads = os.environ.get("OMP_NUM_THREADS", str(self.num_threads))  # the user's own choice first
        environment = {**self.transfer.environment(), "VLLM_API_KEY": key, "OMP_NUM_THREADS": threads}
        self._arguments["dtype"] = self.dtype = self._arguments["dtype"] or stored_dtype(model)
        replicas = [Replica(n, model, self._arguments_of(n), environment=environment) for n in range(self.replicas)]
        self._fleet = ReplicaFleet(
            replicas,
            key,
            in_flight_weight_updates=self.in_flight_weight_updates,
            clear_cache=self.clear_cache,
            transfer=self.transfer,
            update_timeout_s=self.update_timeout_s,
            startup_timeout_s=self.startup_timeout_s,
            recovery_timeout_s=self.startup_timeout_s,
            sleep_level=self.sleep_level,
        )
        self._fleet.setup(model)

    def _arguments_of(self, number: int) -> dict[str, Any]:
        """Fields of `AsyncEngineArgs` of one replica: its share of the GPUs, another seed."""
        size = self._arguments["tensor_parallel_size"]
        gpus = self._arguments["device_ids"]
        if gpus is None and not is_cpu_build():
            gpus = list(range(self.replicas * size))
        found = {name: value for name, value in self._arguments.items() if name not in SET_BY_SERVE}
        mine = None if gpus is None else gpus[number * size : (number + 1) * size]
        return {**found, "device_ids": mine, "seed": self._arguments["seed"] + number}

    @property
    def _started(self) -> ReplicaFleet:
        return set_up(self._fleet)

    @property
    def max_model_len(self) -> int:
        return self._started.max_model_len

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._started.probe = self.probe
        self._started.load_weights(version, weights)
        self.update_pauses_s = self._started.update_pauses_s

    def sleep(self) -> None:
        self._started.sleep()

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self._fleet is not None and self._fleet.needs_weights

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._started.submit(requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        return self._started.poll(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        self._started.abort(request_ids)

    def partial_completions(self) -> list[Completion]:
        """None: replicas report whole groups; those that run at a checkpoint start over when it is resumed."""
        return []

    @property
    def busy_s(self) -> float:
        return 0.0 if self._fleet is None else self._fleet.busy_s

    @property
    def num_tokens(self) -> int:
        return 0 if self._fleet is None else self._fleet.num_tokens

    def close(self) -> None:
        """Stops the replicas and unblocks `poll` and `load_weights`."""
        if self._fleet is not None:
            self._fleet.close()
        super().close()

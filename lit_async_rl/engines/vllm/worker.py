"""Extension of vLLM's worker processes that loads weights. Imports little, because every worker imports it.

Loaded by name: `worker_extension_cls="lit_async_rl.engines.vllm.worker.WorkerExtension"` in the engine's arguments, or
`--worker-extension-cls` of a server. The trainer then calls on all workers, between two decode steps,

    collective_rpc("load_policy_weights", kwargs={"folder": "/dev/shm/..."})

or, on a server, POST /collective_rpc {"method": "load_policy_weights", "kwargs": {"folder": ...}, "timeout": ...}.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lit_async_rl.engines.vllm.engine_arguments import unusable_settings
from lit_async_rl.engines.vllm.incoming import Held, Incoming
from lit_async_rl.engines.vllm.model_identity import describe_config
from lit_async_rl.engines.vllm.weight_buffer import LayerBuffer, load_twin
from lit_async_rl.utils.processes import die_with_parent


def end_with_trainer() -> None:
    """Has the kernel kill this process when the process that spawned it ends, also after `kill -9`.

    vLLM leaves its engine process, and the memory it holds, behind when the trainer is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not die_with_parent(parent.pid):
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the request


def allow_amx() -> None:
    """Asks the kernel for permission to use AMX, without which the CPU refuses it with SIGILL.

    vLLM's attention uses it in bfloat16 and does not ask. Usually a matrix product of oneDNN has asked before, but in a
    first step of at most four tokens, with weights of less than 1 MiB, there is none (vLLM 0.32).
    """
    torch.cpu._init_amx()


def register() -> None:
    """Entry point `vllm.general_plugins`: every vLLM process runs it, so it acts only if the variable is set."""
    if os.environ.get("LIT_ASYNC_RL_DIE_WITH_PARENT") == "1":
        end_with_trainer()


class WorkerExtension:
    """Mixin that vLLM adds to its worker class, which has the attributes used here."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _held = Held()
    _incoming: Incoming
    _expected: set[str]
    _recorded: set[str]
    _buffer: LayerBuffer | None = None
    _is_in_host_memory = False
    _read: list[tuple[str, Tensor]] = []  # noqa: RUF012  (replaced, never changed)

    def describe_policy(self) -> dict[str, Any]:
        """Model, precision, and settings that break a promise, which the trainer checks before it uses a server."""
        import transformers

        return {
            "model": describe_config(self.model_config.hf_text_config),
            "transformers": transformers.__version__,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "can_sleep": bool(self.model_config.enable_sleep_mode),
            "problems": unusable_settings(self.vllm_config),
        }

    # -- checking what vLLM's own transfers load

    def record_loaded_weights(self) -> None:
        """Begins to note what is loaded, for `check_loaded_weights`."""
        model = self.model_runner.get_model()
        model.__dict__.pop("load_weights", None)  # of an update that failed
        load, recorded = model.load_weights, set[str]()
        self._expected, self._recorded = {name for name, _ in model.named_parameters()}, recorded

        def loading(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
            loaded = load(weights)
            recorded.update(self._expected if loaded is None else loaded)  # a loader that does not say
            return loaded

        model.load_weights = loading

    def check_loaded_weights(self) -> None:
        """Ends that.

        Raises:
            RuntimeError: the model has weights that were not loaded meanwhile.
        """
        self.model_runner.get_model().__dict__.pop("load_weights", None)
        self._check_complete(self._expected, self._recorded)

    def _check_complete(self, expected: set[str], loaded: set[str] | None) -> None:
        """VLLM itself would only log what was not loaded, and keep the old weights."""
        if loaded is None or self.model_config.quantization is not None:
            return
        if missing := expected - loaded:
            raise RuntimeError(f"the policy's weights lack what vLLM's model has: {min(missing)!r}")

    # -- loading weights: at once ...

    def load_policy_weights(self, folder: str) -> None:
        """Replaces the weights by those in a folder of safetensors files, or those that an update changes.

        No generation may run meanwhile. After an error the weights may be mixed: stop the engine.

        Raises:
            RuntimeError: the folder lacks weights of the model, or updates others than those that were loaded last.
        """
        self._incoming = Incoming(folder, self._held)
        self._load_in_place(self._incoming.weights())
        self._held = self._incoming.held()

    def _load_in_place(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(weights)
            finalize_layerwise_reload(model, self.model_config)
            repack_tied_head(model, self.model_config.hf_text_config.tie_word_embeddings)
        if not self._incoming.is_update:
            self._check_complete(expected, loaded)

    # -- ... or, with a shorter pause, in two steps

    def begin_policy_weights(self, folder: str) -> None:
        """Begins to load weights in a thread while generation goes on; `swap_policy_weights` makes them count."""
        from vllm.platforms import current_platform

        self._incoming = Incoming(folder, self._held)
        self._held = Held()  # until the swap, no update can build on what this one begins with
        self._is_in_host_memory = not current_platform.is_cpu() or self.model_config.quantization is not None
        load = self._read_into_host_memory if self._is_in_host_memory else self._load_twin
        self._buffer = LayerBuffer(self.model_runner.get_model(), load)

    def _read_into_host_memory(self, twin: nn.Module) -> None:
        """A second set of layers would take twice the memory of the GPU; copies from pinned memory are fast."""
        copy = Tensor.pin_memory if torch.cuda.is_available() else Tensor.clone
        self._read = [(name, copy(weight)) for name, weight in self._incoming.weights()]

    def _load_twin(self, twin: nn.Module) -> None:
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            loaded = load_twin(twin, model, self._incoming.weights(), self.model_config)
        if not self._incoming.is_update:
            self._check_complete(expected, loaded)

    def policy_weights_state(self) -> dict[str, bool]:
        """Whether `swap_policy_weights` can be called, as `loaded`.

        Raises:
            RuntimeError: loading failed; the weights that generate are as they were.
        """
        return {"loaded": self._buffer is not None and self._buffer.is_loaded()}

    def swap_policy_weights(self) -> None:
        """Uses the weights that `begin_policy_weights` has loaded. No generation may run meanwhile."""
        if self._buffer is None or not self._buffer.is_loaded():
            raise RuntimeError("no weights are loaded that could be swapped in")
        buffer, self._buffer = self._buffer, None
        if self._is_in_host_memory:
            weights, self._read = self._read, []
            self._load_in_place(weights)
        else:
            buffer.swap()
        self._held = self._incoming.held()


def repack_tied_head(model: nn.Module, tied: bool) -> None:
    """Repacks a tied head on a CPU, which otherwise keeps a packed copy of the initial embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not tied or not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


end_with_trainer()
allow_amx()

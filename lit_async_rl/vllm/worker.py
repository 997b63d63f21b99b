"""Extension of vLLM's worker processes that loads weights. Imports little, because every worker imports it.

Loaded by name: `worker_extension_cls="lit_async_rl.vllm.worker.WorkerExtension"` in the engine's arguments. The
trainer then calls on all workers, between two decode steps,

    collective_rpc("load_policy_weights", kwargs={"folder": "/dev/shm/..."})
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lit_async_rl.engines.weight_deltas import IncomingWeights, LoadedWeights
from lit_async_rl.runtime.lifetime import die_with_parent
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.utils.device_memory import PinnedArena

# -- Double buffering of a vLLM model's layers: weights are loaded into a second set while the first generates --------
# Used in vLLM's worker. A thread reads, fuses, casts and (on a CPU) packs the weights for the kernels. The pause only
# exchanges references.


_TENSORS = ("_parameters", "_buffers")
_SLOTS = (*_TENSORS, "_modules", "_non_persistent_buffers_set")


class LayerBuffer:
    """Loads weights in a thread while the model generates.

    Args:
        model: of vLLM.
        load: loads weights into a twin of the model; called in the thread.
    """

    def __init__(self, model: nn.Module, load: Callable[[nn.Module], None]) -> None:
        self._model = model
        self._load = load
        self._before: dict[str, dict[tuple[str, str], Any]] = {}  # of each layer
        self._twin: nn.Module | None = None
        self._error: BaseException | None = None
        self._thread = start_thread(self._run, name="weights")

    def _run(self) -> None:
        try:
            with torch.no_grad():
                twin = twin_of(self._model)
                self._before = {name: _contents(layer) for name, layer in twin.named_modules()}
                self._load(twin)
            self._twin = twin
        except BaseException as error:
            self._error = error

    def is_loaded(self) -> bool:
        """Whether the weights are ready.

        Raises:
            RuntimeError: loading failed; the generating model is unchanged.
        """
        if self._thread.is_alive():  # afterwards `_twin` or `_error` is set, and no longer written by the thread
            return False
        if self._error is not None:
            raise RuntimeError(str(self._error) or type(self._error).__name__) from self._error
        return True

    def swap(self) -> None:
        """Moves the new weights into the model; no generation may run meanwhile. The old ones are freed later."""
        if self._twin is None:
            raise RuntimeError("`swap` was called before the new weights were loaded")
        twins = dict(self._twin.named_modules())
        replaced = []
        for name, layer in self._model.named_modules():
            replaced += _copy_changes(layer, twins[name], self._before[name])
        self._twin = None
        self._before = {}
        start_thread(_free, replaced, name="old weights")


def twin_of(module: nn.Module, twins: dict[int, nn.Module] | None = None) -> nn.Module:
    """Copy of a tree of modules with the same tensors, each replaceable independently."""
    twins = {} if twins is None else twins
    if id(module) in twins:
        return twins[id(module)]
    twin = twins[id(module)] = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    for slot in _SLOTS:
        twin.__dict__[slot] = module.__dict__[slot].copy()
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twin_of(child, twins)
    return twin


def load_twin(twin: Any, model: nn.Module, weights: Iterable[tuple[str, Tensor]], config: Any) -> set[str] | None:
    """Loads weights into a twin of `model`, which stays unchanged; returns the names that vLLM's loader reports.

    Layers without new weights keep `model`'s tensors.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    layers = list(zip(twin.modules(), model.modules(), strict=True))
    for layer, original in layers:
        info = get_layerwise_info(original)
        parameters, buffers = (
            {name: _metadata_for(layer, tensor, original) for name, tensor in kind.items()}
            for kind in info.restore_metadata
        )
        LAYERWISE_INFO[layer] = LayerReloadingInfo((parameters, buffers), info.restore_device)
    initialize_layerwise_reload(twin)
    infos = [get_layerwise_info(layer) for layer, _ in layers]
    kernel_tensors = [info.kernel_tensors for info in infos]
    for info in infos:
        info.kernel_tensors = None  # otherwise vLLM copies loaded weights into the tensors of the generating model
    loaded = twin.load_weights(weights)
    for info, tensors in zip(infos, kernel_tensors, strict=True):
        if info.can_load() and info.load_numel <= 0:
            info.kernel_tensors = tensors
    finalize_layerwise_reload(twin, config)
    _tie_heads(layers)
    for layer, _ in layers:
        LAYERWISE_INFO.pop(layer, None)  # its reference would keep the layer's memory forever
    before = dict(model.named_parameters())
    for name, tensor in twin.named_parameters():
        if name in (loaded or ()) and before.get(name) is tensor:
            raise RuntimeError(f"vLLM reports {name!r} as loaded, but did not load it")
    return None if loaded is None else set(loaded)


def _metadata_for(twin: nn.Module, tensor: Any, original: nn.Module) -> Tensor:
    """Copy of a layer's metadata tensor with a loader for the twin.

    These tensors still have vLLM's loaders of an earlier reload, which would load nothing.
    """
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    copied: Any = to_meta_tensor(tensor)
    for name, value in copied.__dict__.items():
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and (value.__self__ is original or value.__self__ is layer_ref_sentinel):
            value = value.__func__.__get__(twin)
        copied.__dict__[name] = value
    return copied


def _tie_heads(layers: list[tuple[Any, Any]]) -> None:
    """Gives heads tied to an embedding its new weight, packed for the CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [
        (twin, old) for twin, old in layers if isinstance(old, VocabParallelEmbedding) and twin.weight is not old.weight
    ]
    for twin, old in layers:
        if not isinstance(old, ParallelLMHead) or twin.weight is not old.weight:
            continue
        for embedding, old_embedding in embeddings:
            if old_embedding.weight is old.weight:
                twin.weight = embedding.weight
                twin.quant_method.process_weights_after_loading(twin)


def _contents(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Tensors and attributes of a layer, without its children, by slot and name."""
    tensors = {(slot, name): value for slot in _TENSORS for name, value in layer.__dict__[slot].items()}
    return tensors | {("", name): value for name, value in layer.__dict__.items() if name not in _SLOTS}


def _copy_changes(layer: nn.Module, twin: nn.Module, before: dict[tuple[str, str], Any]) -> list[Any]:
    """Copies references that loading changed in a twin to its layer; returns the replaced objects."""
    replaced: list[Any] = []
    for (slot, name), value in _contents(twin).items():
        if before.get((slot, name)) is not value:
            target = layer.__dict__[slot] if slot else layer.__dict__
            replaced.append(target.get(name))
            target[name] = value
    return replaced


def _free(replaced: list[Any]) -> None:
    """Frees memory in small steps: returning half a gigabyte at once would stall other threads.

    A twin is in reference cycles (loaders of its parameters), which Python would collect late, as it counts objects,
    not bytes. vLLM has frozen earlier objects, so a collection takes milliseconds.
    """
    while replaced:
        replaced.pop()
        time.sleep(0.001)
    gc.collect()


def end_with_trainer() -> None:
    """Makes the kernel kill this process when its parent ends, also after `kill -9`."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not die_with_parent(parent.pid):
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the request to the kernel


def allow_amx() -> None:
    """Asks the kernel for AMX, whose instructions otherwise raise SIGILL.

    vLLM's attention uses AMX in bfloat16 without asking. Usually a matrix product of oneDNN has asked before, but not
    in a first step of at most four tokens with weights of less than 1 MiB (vLLM 0.32).
    """
    torch.cpu._init_amx()


def register() -> None:
    """Entry point `vllm.general_plugins`. Every vLLM process on the machine runs it, so it checks our variable."""
    if os.environ.get("LIT_ASYNC_RL_DIE_WITH_PARENT") == "1":
        end_with_trainer()


class WorkerExtension:
    """Mixin that vLLM adds to its worker class, which has the attributes used here."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _held = LoadedWeights()
    _incoming: IncomingWeights
    _expected: set[str]
    _recorded: set[str]
    _buffer: LayerBuffer | None = None
    _is_in_host_memory = False
    _arena = PinnedArena()  # a process has one worker
    _read: list[tuple[str, Tensor]] = []  # noqa: RUF012  (replaced, never changed)

    # -- checking what vLLM's own transfers load

    def record_loaded_weights(self) -> None:
        """Starts recording loaded weights, for `check_loaded_weights`."""
        model = self.model_runner.get_model()
        model.__dict__.pop("load_weights", None)  # left by an update that failed
        load = model.load_weights
        recorded = set[str]()
        self._expected = {name for name, _ in model.named_parameters()}
        self._recorded = recorded

        def loading(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
            loaded = load(weights)
            recorded.update(self._expected if loaded is None else loaded)  # None: the loader reports no names
            return loaded

        model.load_weights = loading

    def check_loaded_weights(self) -> None:
        """Stops recording, and checks that all weights were loaded.

        Raises:
            RuntimeError: a weight of the model was not.
        """
        self.model_runner.get_model().__dict__.pop("load_weights", None)
        self._check_complete(self._expected, self._recorded)

    def _check_complete(self, expected: set[str], loaded: set[str] | None) -> None:
        """Checks that all weights were loaded; vLLM only logs missing ones, and keeps old values."""
        if loaded is None or self.model_config.quantization is not None:
            return
        if missing := expected - loaded:
            raise RuntimeError(f"the policy's weights lack {min(missing)!r}, which vLLM's model has")

    # -- loading weights in one step

    def load_policy_weights(self, folder: str) -> None:
        """Loads a folder of safetensors files with all weights, or an update's changes.

        No generation may run meanwhile. After an error the weights may be mixed: stop the engine.

        Raises:
            RuntimeError: the folder lacks weights of the model, or updates other weights than the loaded ones.
        """
        self._incoming = IncomingWeights(folder, self._held)
        self._load_in_place(self._incoming.weights())
        self._held = self._incoming.loaded_weights()

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

    # -- loading weights in two steps, with a shorter pause

    def begin_policy_weights(self, folder: str) -> None:
        """Starts loading weights in a thread while generation continues, until `swap_policy_weights`."""
        from vllm.platforms import current_platform

        self._incoming = IncomingWeights(folder, self._held)
        self._held = LoadedWeights()  # the thread changes the stored copy: until the swap no update can apply to it
        self._is_in_host_memory = not current_platform.is_cpu() or self.model_config.quantization is not None
        load = self._read_into_host_memory if self._is_in_host_memory else self._load_twin
        self._buffer = LayerBuffer(self.model_runner.get_model(), load)

    def _read_into_host_memory(self, twin: nn.Module) -> None:
        """Reads weights into pinned memory: a second set of layers would double the memory on the GPU."""
        weights = dict(
            self._incoming.weights()
        )  # mapped files, and copies that are kept anyway: no memory of their own
        self._read = list(zip(weights, self._arena.copies(list(weights.values())), strict=True))

    def _load_twin(self, twin: nn.Module) -> None:
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            loaded = load_twin(twin, model, self._incoming.weights(), config=self.model_config)
        if not self._incoming.is_update:
            self._check_complete(expected, loaded)

    def policy_weights_state(self) -> dict[str, bool]:
        """Whether `swap_policy_weights` can be called, as `loaded`.

        Raises:
            RuntimeError: loading failed; the weights in use are unchanged.
        """
        return {"loaded": self._buffer is not None and self._buffer.is_loaded()}

    def swap_policy_weights(self) -> None:
        """Takes the weights loaded by `begin_policy_weights` into use. No generation may run meanwhile."""
        if self._buffer is None or not self._buffer.is_loaded():
            raise RuntimeError("the engine cannot switch to new weights, because no new weights have been loaded")
        buffer = self._buffer
        self._buffer = None
        if self._is_in_host_memory:
            weights = self._read
            self._read = []
            self._load_in_place(weights)
        else:
            buffer.swap()
        self._held = self._incoming.loaded_weights()


def repack_tied_head(model: nn.Module, tied: bool) -> None:
    """Repacks a tied head on a CPU, which would keep a packed copy of the initial embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not tied or not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


end_with_trainer()
allow_amx()

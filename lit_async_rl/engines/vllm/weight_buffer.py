"""Second set of a vLLM model's layers: weights are loaded into it while the first generates, then they change places.

Used in vLLM's worker. Loading means reading, fusing, casting and, on a CPU, packing for its kernels: all of it happens
in a thread of its own. What remains for the pause is an exchange of references.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_TENSORS = ("_parameters", "_buffers")
_SLOTS = (*_TENSORS, "_modules", "_non_persistent_buffers_set")


class LayerBuffer:
    """Loads weights in a thread, beside the model that generates.

    Args:
        model: of vLLM.
        load: called in the thread with a twin of the model; loads it.
    """

    def __init__(self, model: nn.Module, load: Callable[[nn.Module], None]) -> None:
        self._model, self._load = model, load
        self._before: dict[str, dict[tuple[str, str], Any]] = {}  # of each layer
        self._twin: nn.Module | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

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
            RuntimeError: loading failed; the model that generates is as it was.
        """
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise RuntimeError(str(self._error) or type(self._error).__name__) from self._error
        return True

    def swap(self) -> None:
        """Has the model use the new weights; no generation may run meanwhile. The old ones are freed later."""
        if self._twin is None:
            raise RuntimeError("the weights are not loaded yet")
        twins, replaced = dict(self._twin.named_modules()), []
        for name, layer in self._model.named_modules():
            replaced += _take_over(layer, twins[name], self._before[name])
        self._twin, self._before = None, {}
        threading.Thread(target=_free, args=(replaced,), name="old weights", daemon=True).start()


def twin_of(module: nn.Module, twins: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of a tree of modules that has the same tensors, of which each can be replaced."""
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
    """Loads weights into a twin of `model`, leaving that as it is; returns what vLLM's loader says it loaded.

    Layers without any of the weights keep the tensors of `model`.
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
        info.kernel_tensors = None  # else vLLM would copy what it has loaded over the tensors that generate
    loaded = twin.load_weights(weights)
    for info, tensors in zip(infos, kernel_tensors, strict=True):
        if info.can_load() and info.load_numel <= 0:
            info.kernel_tensors = tensors
    finalize_layerwise_reload(twin, config)
    _tie_heads(layers)
    for layer, _ in layers:
        LAYERWISE_INFO.pop(layer, None)  # refers to the layer, which it would keep for ever
    before = dict(model.named_parameters())
    for name, tensor in twin.named_parameters():
        if name in (loaded or ()) and before.get(name) is tensor:
            raise RuntimeError(f"vLLM says that it has loaded {name!r}, and has not")
    return None if loaded is None else set(loaded)


def _metadata_for(twin: nn.Module, tensor: Any, original: nn.Module) -> Tensor:
    """A copy of a layer's metadata tensor whose loader loads into the twin.

    vLLM leaves loaders that belong to one reload of one layer on these tensors; with them nothing would be loaded.
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
    """Gives heads that share the weight of an embedding the new one, packed for the CPU."""
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
    found = {(slot, name): value for slot in _TENSORS for name, value in layer.__dict__[slot].items()}
    return found | {("", name): value for name, value in layer.__dict__.items() if name not in _SLOTS}


def _take_over(layer: nn.Module, twin: nn.Module, before: dict[tuple[str, str], Any]) -> list[Any]:
    """Gives a layer what loading has changed in its twin, and leaves all else; returns what was replaced."""
    replaced: list[Any] = []
    for (slot, name), value in _contents(twin).items():
        if before.get((slot, name)) is not value:
            target = layer.__dict__[slot] if slot else layer.__dict__
            replaced.append(target.get(name))
            target[name] = value
    return replaced


def _free(replaced: list[Any]) -> None:
    """Frees memory bit by bit: giving half a gigabyte back at once holds up everything else.

    A twin is in cycles (loaders of its parameters), which would stay for long: Python counts objects, and not their
    bytes. vLLM has frozen what was there before, so that a collection takes milliseconds.
    """
    while replaced:
        replaced.pop()
        time.sleep(0.001)
    gc.collect()

"""Meta-device loading: weights are read after sharding, so no process holds all of them.

The model is built on the meta device; then each process reads its own slices (FSDP2, tensor parallelism), or one block
after the other (FSDP1), from the safetensors files of the Hugging Face model.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from lit_async_rl.models.architecture import stored_buffers

_patching = threading.Lock()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which parameters are created on the meta device; buffers, which files do not hold, get their values.

    Patches `nn.Module` while active, for this thread.
    """
    owner = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == owner:  # one on meta may be tied
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with _patching:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameters are still on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


class WeightFiles:
    """Reader of the safetensors files of a model.

    Args:
        model: Hugging Face name or folder.

    Raises:
        ValueError: there is no safetensors file.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        folder = model if Path(model).is_dir() else snapshot_download(model, allow_patterns=["*.safetensors*"])
        self._reader = HuggingFaceStorageReader(str(folder))
        self._names = self._reader.read_metadata().state_dict_metadata.keys()
        if not self._names:
            raise ValueError(f"model.sharding.meta_device needs safetensors files; model.model={model!r} has none")

    @torch.no_grad()
    def read(self, lm: nn.Module, part: nn.Module, device: torch.device) -> None:
        """Reads stored buffers of `part`, and its parameters that are on meta; sharded ones read their own slices.

        Args:
            lm: model whose parameter names the files use; contains `part`.
            part: block of `lm`, or `lm` itself.
            device: device of the parameters.

        Raises:
            ValueError: names or shapes in the files differ.
        """
        inside = {id(p) for p in part.parameters() if p.is_meta}
        names = [name for name, p in lm.named_parameters() if id(p) in inside]  # tied ones once
        allocate(part, device)
        own = dict(lm.named_parameters())
        buffers = {id(buffer) for _, buffer in stored_buffers(part)}  # by now on `device`
        stored = {name: b for name, b in stored_buffers(lm) if id(b) in buffers and name in self._names}
        self._load({name: own[name].detach() for name in names} | stored)

    def _load(self, parameters: Mapping[str, Tensor]) -> None:
        if unknown := parameters.keys() - self._names:
            raise ValueError(
                f"model.sharding.meta_device: the files of model.model={self.model!r} have no weight {min(unknown)!r}; "
                "transformers renames them while it loads. Leave meta_device out for this model."
            )
        state: dict[str, Any] = dict(parameters)
        with warnings.catch_warnings():  # every process reads by itself, on purpose
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp.load(state, storage_reader=self._reader, no_dist=True)


def allocate(part: nn.Module, device: torch.device) -> None:
    """Allocates parameters on the meta device; tied ones stay tied, because tensors are swapped in place."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for module in part.modules():
            if any(p.is_meta for p in module.parameters(recurse=False)):
                buffers = dict(module.named_buffers(recurse=False))
                module.to_empty(device=device, recurse=False)
                for name, buffer in buffers.items():
                    module._buffers[name] = buffer.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

"""Rollout engines: the interface, the embedded torch engine, and what engines in other processes share."""

from typing import Any

import lazy_loader

_found, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_VLLM = (  # were here
    "FileTransfer",
    "IpcTransfer",
    "NcclTransfer",
    "SharedMemoryTransfer",
    "VLLMEngine",
    "WeightTransfer",
)


def __getattr__(name: str) -> Any:
    if name not in _VLLM:
        return _found(name)
    import lit_async_rl

    return getattr(lit_async_rl, name)

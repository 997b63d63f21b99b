"""Rollout engines: the interface, the embedded torch engine, and what engines in other processes share."""

from lit_async_rl.utils.public_names import attach

VLLM = ("FileTransfer", "IpcTransfer", "NcclTransfer", "SharedMemoryTransfer", "VLLMEngine", "WeightTransfer")
__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=VLLM)

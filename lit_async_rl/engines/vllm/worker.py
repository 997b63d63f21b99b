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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from lit_async_rl.engines.vllm.engine_arguments import unusable_settings
from lit_async_rl.engines.vllm.model_identity import describe_config
from lit_async_rl.engines.vllm.weight_folders import PREFIX
from lit_async_rl.utils.processes import die_with_parent


def end_with_trainer() -> None:
    """Has the kernel kill this process when the process that spawned it ends, also after `kill -9`.

    vLLM leaves its engine process, and the memory it holds, behind when the trainer is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not die_with_parent(parent.pid):
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the request


def register() -> None:
    """Entry point `vllm.general_plugins`: every vLLM process runs it, so it acts only if the variable is set."""
    if os.environ.get("LIT_ASYNC_RL_DIE_WITH_PARENT") == "1":
        end_with_trainer()


def read_folder(folder: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in the safetensors files of a folder; reads data only, no code.

    The client of a server chooses the folder. It must have been created by a trainer and hold regular files, no links
    or pipes, so that a client cannot have other models on the server's disk read.

    Raises:
        PermissionError: the folder was not created by a trainer.
        FileNotFoundError: it holds no safetensors files.
    """
    if not Path(folder).name.startswith(PREFIX) or Path(folder).is_symlink():
        raise PermissionError(f"{folder!r} was not created by a trainer: its name must begin with {PREFIX}")
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder!r}: can this machine see the trainer's folder?")
    for file in files:
        if file.is_symlink() or not file.is_file():
            raise PermissionError(f"{str(file)!r} is a link or a device, not a file of a trainer")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                yield name, tensors.get_tensor(name)


class WorkerExtension:
    """Mixin that vLLM adds to its worker class, which has the attributes used here."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def describe_policy(self) -> dict[str, Any]:
        """Model, precision, and settings that break a promise, which the trainer checks before it uses a server."""
        import transformers

        return {
            "model": describe_config(self.model_config.hf_text_config),
            "transformers": transformers.__version__,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "problems": unusable_settings(self.vllm_config),
        }

    def load_policy_weights(self, folder: str) -> None:
        """Replaces all weights by those in a folder of safetensors files.

        No generation may run meanwhile. After an error the weights may be mixed: stop the engine.

        Raises:
            RuntimeError: the folder lacks weights of the model.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(read_folder(folder))
            finalize_layerwise_reload(model, self.model_config)
            repack_tied_head(model, self.model_config.hf_text_config.tie_word_embeddings)
        missing = expected - loaded if loaded is not None and self.model_config.quantization is None else set()
        if missing:  # vLLM itself would only log it and keep the old ones
            raise RuntimeError(f"the policy's weights lack what vLLM's model has: {min(missing)!r}")


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

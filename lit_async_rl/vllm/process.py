"""Runs vLLM's `AsyncLLM` in its own event loop and thread, with thread-safe calls."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_config
from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.runtime.process import end_reason
from lit_async_rl.vllm.engine_arguments import (
    CPU_VARIABLES,
    DIE_WITH_PARENT,
    LAUNCHER_VARIABLES,
    VARIABLES,
    check_vllm,
    unusable_settings,
)
from lit_async_rl.vllm.weight_transfer import EngineControl

JOIN_S = 10.0
THREAD_NAME = "vllm"


class VLLMProcess(EngineControl):
    """One `AsyncLLM`; its model runs in child processes that end with this one.

    Args:
        arguments: fields of vLLM's `AsyncEngineArgs`.
        update_timeout_s: timeout of a call.
    """

    _loop: LoopThread  # from `start` on; its thread outlives the processes, which would die with it

    def __init__(self, arguments: dict[str, Any], update_timeout_s: float) -> None:
        self.arguments = arguments
        self.update_timeout_s = update_timeout_s
        self.num_workers = 0  # set in `start`
        self.llm: Any = None
        self._is_closed = False
        self._children: list[Any] = []

    def start(self, timeout_s: float) -> None:
        """Starts vLLM and returns when it accepts requests.

        Raises:
            StalledError: it did not start within `timeout_s`.
            EngineError: it failed to start; its error is the cause.
        """
        others = set(multiprocessing.active_children())
        self._loop = LoopThread(THREAD_NAME)
        try:
            self._loop.call(self._boot(), timeout_s, "the start of vLLM", setting="data.engine.startup_timeout_s")
        except (StalledError, EngineError):
            self._is_closed = True  # if it starts all the same, it ends at once
            for child in self._started_since(others):
                child.kill()
            self._loop.close(timeout_s=0.0)
            raise
        self._children = self._started_since(others)
        self.num_workers = int(self.llm.vllm_config.parallel_config.world_size_across_dp)

    @staticmethod
    def _started_since(others: set[Any]) -> list[Any]:
        new = set(multiprocessing.active_children()) - others
        return [child for child in new if child.name.startswith("EngineCore")]

    async def _boot(self) -> None:
        """Starts vLLM with tasks in the running loop; blocks it meanwhile."""
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments))
        except BaseException as error:
            raise EngineError(f"vLLM did not start: {error} (vLLM's own messages are above)") from error
        if self._is_closed:
            llm.shutdown(timeout=0)
        else:
            self.llm = llm

    @property
    def is_dead(self) -> bool:
        """Whether vLLM's processes have ended without `close`."""
        return self.llm is not None and not self._is_closed and self.llm.errored

    @property
    def death(self) -> str:
        """How its processes ended, with signal or status if known."""
        codes = {child.exitcode for child in self._children} - {None, 0}
        ends = ", ".join(end_reason(code) for code in sorted(codes))
        return f"its processes died{f' ({ends})' if ends else ''}; their own messages are above"

    def call(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
        """Runs `coroutine` in the loop; returns its result or raises its error.

        Raises:
            StalledError: `what` did not finish within `update_timeout_s`.
            EngineError: vLLM's processes died, or `close` was called.
        """

        def check() -> None:
            if self.is_dead or self._is_closed:
                raise EngineError(f"vLLM's processes {'died' if self.is_dead else 'were closed'} during {what}")

        limit_s = self.update_timeout_s
        return self._loop.call(coroutine, limit_s, what, setting="data.engine.update_timeout_s", check=check)

    def soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Schedules `callback` in the loop's thread."""
        self._loop.soon(callback, *args)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method on every worker."""
        return list(self.call(self.llm.collective_rpc(method, kwargs=kwargs), f"vLLM's {method}"))

    def close(self) -> None:
        """Stops the processes and joins the thread. Safe to call twice, and from any thread but the loop's."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.end_tasks()  # vLLM's output handler, too, which would report the shutdown as a failure
        self.llm.shutdown(timeout=0)
        self.llm = None  # its destructor would shut it down again, during the interpreter's finalization
        self._loop.close()
        for child in self._children:
            child.join(JOIN_S)


# -- Starts vLLM inside a trainer: checks of installation and model, and the environment of its processes -------------


CPU_KV_CACHE = 2**30  # bytes; vLLM's own default is most of the machine's memory


def start_vllm(
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    num_threads: int,
    startup_timeout_s: float,
    update_timeout_s: float,
) -> VLLMProcess:
    """Starts vLLM, on a CPU with the settings it needs there; returns when it accepts requests.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: it is too old, cannot run this model on this machine, or `arguments` break a guarantee.
        FileNotFoundError: there is no such model.
        EngineError: it failed to start.
        StalledError: it did not start within `startup_timeout_s`.
    """
    check_vllm()
    with engine_environment(environment, num_threads):
        if not has_gpu():
            check_head_size(arguments["model"])
            cache = arguments["kv_cache_memory_bytes"] or CPU_KV_CACHE
            arguments = {**arguments, "enforce_eager": True, "kv_cache_memory_bytes": cache}
        process = VLLMProcess(arguments, update_timeout_s)
        process.start(startup_timeout_s)
    if problems := unusable_settings(process.llm.vllm_config):  # set through a field that was not refused before
        process.close()
        raise ValueError(f"data.engine.engine_args cannot be used: {problems[0]}")
    return process


def check_head_size(model: str) -> None:
    """Checks that vLLM's CPU kernels support the model's attention head size.

    Raises:
        ValueError: they do not; lists the supported sizes.
        FileNotFoundError: there is no such model.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    config: Any = load_config(model).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in supported:
        raise ValueError(
            f"model.model={model!r} has attention heads of size {size}, but on a CPU, vLLM supports only "
            f"sizes {', '.join(map(str, supported))}. Use another model, or EmbeddedEngine."
        )


@contextmanager
def engine_environment(changes: Mapping[str, str], num_threads: int) -> Iterator[None]:
    """Context with the environment of the engine's processes; restores the trainer's afterwards.

    The user's variables are kept, except those of a distributed launcher. vLLM sets variables as it starts (LD_PRELOAD,
    LOCAL_WORLD_SIZE), which other children of the trainer must not inherit.
    """
    before = dict(os.environ)
    try:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        _set_defaults(VARIABLES | DIE_WITH_PARENT)  # before the import of vLLM, which reads some of them
        _set_defaults({"OMP_NUM_THREADS": str(num_threads)} | ({} if has_gpu() else CPU_VARIABLES))
        os.environ.update(changes)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def has_gpu() -> bool:
    """Whether the installed vLLM runs on an accelerator."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()

"""vLLM as the engine inside a trainer: continuous batching, in-flight weight updates, a version for every token.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished sample | the loop's thread, an error, `close` |
| `load_weights` (trainer's thread) | vLLM's processes; without in-flight updates all requests first | the same |
| the loop's thread | vLLM's sockets, calls from other threads | asyncio |

Every wait has a timeout. After an error in the loop's thread or in vLLM's processes, the next call from another thread
raises it, and the engine is stopped: it never samples from half-loaded weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine, check_request, set_up
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.end_tokens import stored_eos_token_ids
from lit_async_rl.models.loading import base_of, load_config, stored_dtype
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams
from lit_async_rl.utils.checks import MANY, check_range
from lit_async_rl.vllm.engine_arguments import FIXED_ARGUMENTS, check_engine_arguments, engine_gpus
from lit_async_rl.vllm.file_transfer import SharedMemoryTransfer
from lit_async_rl.vllm.process import VLLMProcess, start_vllm
from lit_async_rl.vllm.requests import RequestBook, RequestRunner, check_sampling
from lit_async_rl.vllm.sleep import Gate, Sleep, check_can_sleep, check_sleep_level, default_memory_share
from lit_async_rl.vllm.weight_transfer import WeightTransfer


class VLLMEngine(RolloutEngine):
    """Samples with vLLM (0.32 or newer) in child processes of the trainer.

    When weights change, running completions keep their KV cache, as in PipelineRL (Piche et al. 2025,
    arXiv:2509.19128), and no work is lost. With `clear_cache` vLLM recomputes it with the new weights, as if the new
    policy had generated the text so far. Recorded log-probabilities are those of the sampling distribution either way.
    A sample never reads its prompt from a KV cache of older weights than the version of its first token.

    Not bit-reproducible: the composition of batches depends on timing.

    Args:
        in_flight_weight_updates: False: running requests finish under the old weights before an update.
        clear_cache: recompute the KV cache of running completions after an update.
        transfer: of weights to vLLM's processes; None is `SharedMemoryTransfer()`.
        dtype: of weights and computation; None is that of the model's files.
        tensor_parallel_size: number of GPUs that share a model.
        device_ids: GPUs to use; None takes the first. Set it if the trainer uses the machine's GPUs, too.
        gpu_memory_utilization: share of each GPU's memory for weights and KV cache; None is 0.9 with `device_ids`;
            without, as the trainer may use the same GPU, 0.4, or 0.6 with `sleep_level`.
        kv_cache_memory_gb: GiB of KV cache, in place of that share; on a CPU None is 1.
        max_num_seqs: samples decoded together.
        max_model_len: maximum tokens of prompt and completion; None is the model's context length.
        enforce_eager: disables compilation and CUDA graphs; always on on a CPU.
        enable_prefix_caching: samples of a prompt share its KV cache.
        seed: of vLLM's random number generator.
        num_threads: threads of each worker on a CPU.
        startup_timeout_s: timeout of `setup`.
        update_timeout_s: timeout of each step of `load_weights`.
        engine_args: other fields of vLLM's `AsyncEngineArgs`. Those that would break the engine's guarantees are
            refused, such as `speculative_config`, `logprobs_mode` and `load_format`.
        sleep_level: whether vLLM frees its memory while a trainer on the same GPU trains, with `data.max_staleness` 0.
            0: no. 1: drops the KV cache, and moves the weights to host memory. 2: drops both until the next update, for
            which new requests wait.

    Attributes:
        update_pauses_s: seconds without generation in each weight update.

    Raises:
        ValueError: a setting is out of range, or refused.
    """

    records_heads = True
    records_spans = True

    def __init__(
        self,
        in_flight_weight_updates: bool = True,
        clear_cache: bool = False,
        transfer: WeightTransfer | None = None,
        dtype: str | None = None,
        tensor_parallel_size: int = 1,
        device_ids: list[int] | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_gb: float | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        num_threads: int = 1,
        startup_timeout_s: float = 600.0,
        update_timeout_s: float = 600.0,
        engine_args: dict[str, Any] | None = None,
        sleep_level: int = 0,
    ) -> None:
        check_range(
            "data.engine",
            "integer positive",
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
        check_range("data.engine", f"<= {MANY}", tensor_parallel_size=tensor_parallel_size, max_num_seqs=max_num_seqs)
        check_range(
            "data.engine",
            "positive",
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_gb=kv_cache_memory_gb,
            startup_timeout_s=startup_timeout_s,
            update_timeout_s=update_timeout_s,
        )
        check_range("data.engine", "integer", seed=seed)
        self.sleep_level = check_sleep_level(sleep_level, transfer)
        self.transfer = transfer or SharedMemoryTransfer()
        self.takes_adapters = self.transfer.takes_adapters
        self.in_flight_weight_updates = in_flight_weight_updates
        self.clear_cache = clear_cache
        self.update_pauses_s: list[float] = []
        self.dtype = dtype or "auto"  # resolved in `setup`
        self.num_threads = num_threads
        self.startup_timeout_s = startup_timeout_s
        self.update_timeout_s = update_timeout_s
        self._arguments: dict[str, Any] = dict(
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            device_ids=device_ids,
            gpu_memory_utilization=gpu_memory_utilization or default_memory_share(device_ids, sleep_level),
            kv_cache_memory_bytes=None if kv_cache_memory_gb is None else int(kv_cache_memory_gb * 2**30),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            enable_sleep_mode=sleep_level > 0,
        )
        check_engine_arguments(engine_args or {}, self._arguments)
        self._arguments |= {**FIXED_ARGUMENTS, **(engine_args or {})}
        self.transfer.check_gpus(engine_gpus(self._arguments), trainer_gpu=None)
        self._max_model_len = self._vocab_size = 0
        self._book = RequestBook()
        self._process: VLLMProcess | None = None
        self._gate = Gate(self._start)
        self._sleep = Sleep(sleep_level, self._gate)

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def setup(self, model: str) -> None:
        """Starts vLLM with the architecture of `model`; `load_weights` loads the weights. Raises: see `start_vllm`."""
        self._vocab_size = int(load_config(model).get_text_config().vocab_size)
        self.transfer.check_room(model)
        check_can_sleep(self.sleep_level)
        if torch.cuda.is_available():
            self.transfer.check_gpus(engine_gpus(self._arguments), torch.cuda.current_device())
        # the base of an adapter, with which vLLM cannot start; the first weight update brings the adapter's changes
        arguments = {**self._arguments, **self.transfer.engine_arguments(), "model": base_of(model)}
        arguments["dtype"] = self.dtype = arguments["dtype"] or stored_dtype(model)
        environment = self.transfer.environment()
        self._process = start_vllm(
            arguments,
            environment,
            self.num_threads,
            startup_timeout_s=self.startup_timeout_s,
            update_timeout_s=self.update_timeout_s,
        )
        ends = stored_eos_token_ids(model)
        self._runner = RequestRunner(self._process, self._book, ends, model=model, vocab_size=self._vocab_size)
        self._max_model_len = int(self._process.llm.model_config.max_model_len)

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def _vllm(self) -> VLLMProcess:
        return set_up(self._process)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Stages the weights while generation continues, then pauses it until they are loaded.

        Raises:
            EngineError: loading failed; the engine no longer samples.
            StalledError: a step timed out, or requests did not finish in time; the engine no longer samples.
        """
        stream = iter(weights)
        try:
            self._check()
            self.update_pauses_s.append(self._publish(version, stream))
        except Exception as error:
            self._book.fail(error)
            for _ in stream:  # gathering a tensor is a collective: other ranks wait for this one
                pass
            if isinstance(error, EngineError | StalledError):
                raise
            what = f"vLLM did not take the weights of version {version} and was stopped"
            raise EngineError(f"{what}: {str(error) or type(error).__name__}") from error
        except BaseException as interrupt:  # Ctrl-C reaches all ranks, so that none waits for this one's tensors
            self._book.fail(interrupt)
            raise
        self._book.pause(self.update_pauses_s[-1])
        self._book.version = version

    def _publish(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> float:
        self.transfer.stage(weights)
        self.transfer.prepare(self._vllm)
        self._drain()
        pause_s = self._update(version)
        self.transfer.release()
        return pause_s

    def _drain(self) -> None:
        """Waits for all requests and holds back new ones, unless updates are in flight."""
        if self.in_flight_weight_updates:
            return
        self._gate.shut("update")
        wait = Wait(
            self.update_timeout_s,
            lambda: (
                f"{self._book.num_running} requests did not finish within data.engine.update_timeout_s="
                f"{self.update_timeout_s:g}; new weights wait for them (in_flight_weight_updates=false)"
            ),
        )
        wait.until(self._book.wait_until_idle)

    def _update(self, version: int) -> float:
        """Performs the update; returns its pause in seconds. vLLM stays paused after an error: weights may be mixed."""
        began = time.monotonic()
        vllm = self._vllm
        # not `llm.pause_generation`, which adds a sleep of 20 ms that only affects the order of outputs
        vllm.call(vllm.llm.engine_core.pause_scheduler_async("keep", self.clear_cache), "pausing vLLM")
        with self._sleep.ending(vllm):
            self.transfer.deliver(vllm)
            vllm.call(vllm.llm.update_weight_version(str(version)), "tagging vLLM's weights")
        vllm.call(vllm.llm.resume_generation(), "resuming vLLM")
        pause_s = time.monotonic() - began
        self._gate.open("update", "sleep", version=version)
        return pause_s

    def sleep(self) -> None:
        """Frees memory of KV cache and weights until the next update, unless requests are running."""
        if self.sleep_level:
            self._sleep.begin(self._vllm, lambda: not self._book.num_running)

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self._sleep.is_on and self.sleep_level == 2

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        what = "computing log-probabilities of a fixed sequence"
        found: list[float] = self._vllm.call(self._runner.prompt_logprobs(token_ids), what)
        return found

    def partial_completions(self) -> list[Completion]:
        """Partial completions, and finished ones that `poll` has not returned yet."""
        if self._vllm.is_dead:  # the checkpoint after a failure must still be saved
            return self._book.finished
        partial = self._vllm.call(self._runner.partial_completions(), "reading partial completions")
        return [*partial, *self._book.finished]

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, a token is not in the vocabulary, or
                vLLM refuses a sampling parameter.
            EngineError: the engine failed, or was closed.
        """
        for request in requests:
            check_sampling("data.sampling", request.sampling, request.num_samples)
            check_request(request, self.max_model_len, self._vocab_size)
            if (request.sampling.head or 0) > self._vocab_size:
                raise ValueError(
                    f"with vLLM, data.sampling.head must be <= {self._vocab_size} (vocabulary size of model.model), "
                    f"got {request.sampling.head}"
                )
        self._check()
        self._runner.check(requests)
        self._gate.submit(requests)
        self._sleep.interrupt(self._vllm)

    def check_sampling(self, setting: str, sampling: SamplingParams, num_samples: int) -> None:
        check_sampling(setting, sampling, num_samples)

    def _start(self, requests: Sequence[GenerationRequest], version: int) -> None:
        if requests:
            self._book.begin(request.id for request in requests)
            self._vllm.soon(self._runner.launch, requests, str(version))

    def poll(self, timeout_s: float) -> list[Completion]:
        if self._vllm.is_dead:
            self._check()
        return self._book.take(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        aborted = set(request_ids)
        self._gate.drop(aborted)
        self._vllm.soon(self._runner.cancel, aborted)
        self._book.drop(aborted)  # in the end: completions that arrive in between are dropped, too

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises the recorded failure."""
        if self._vllm.is_dead:
            self._book.fail(EngineError(self._vllm.death))
        self._book.check()

    @property
    def num_running(self) -> int:
        """Requests being generated, each of one or more samples."""
        return self._book.num_running

    @property
    def busy_s(self) -> float:
        """Seconds with running requests, without weight updates."""
        return self._book.busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens reported so far."""
        return self._book.num_tokens

    def close(self) -> None:
        """Stops vLLM's processes and unblocks `poll` and `load_weights`."""
        self._book.close()
        if self._process is not None:
            self._process.close()
        self.transfer.close()

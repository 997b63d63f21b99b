"""Base class of engines that generate in other processes: request book and failed weight updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from lit_async_rl.engines.embedded.limits import check_request
from lit_async_rl.engines.vllm.request_book import RequestBook
from lit_async_rl.engines.vllm.requests import check_sampling
from lit_async_rl.engines.vllm.weight_transfer import WeightTransfer
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_config
from lit_async_rl.utils.spans import ENGINE, Spans

Transfer = TypeVar("Transfer", bound=WeightTransfer)


class BackgroundEngine(RolloutEngine, Generic[Transfer]):
    """Engine around a `RequestBook`, which the calling threads share with whatever generates.

    Subclasses start and end requests (`_launch`, `_cancel`) and publish weights (`_publish`). The first failure is
    recorded in the book; from then on every call raises it, and nothing is sampled.

    Args:
        name: of the generating side, for messages.
        transfer: moves weights there.
        in_flight_weight_updates: False: running requests finish under the old weights before an update.
        clear_cache: whether running completions recompute their KV cache after an update.
    """

    records_heads, records_entropy = True, False

    def __init__(self, name: str, transfer: Transfer, in_flight_weight_updates: bool, clear_cache: bool) -> None:
        self.name, self.transfer = name, transfer
        self.in_flight_weight_updates, self.clear_cache = in_flight_weight_updates, clear_cache
        self.takes_adapters = transfer.takes_adapters
        self.update_pauses_s: list[float] = []  # seconds without generation in each weight update
        self._book = RequestBook(name)
        self._max_model_len = self._vocab_size = 0

    def _read_config(self, model: str) -> Any:
        """Text configuration of the model. Raises FileNotFoundError if there is no such model."""
        config: Any = load_config(model).get_text_config()
        self._vocab_size = int(config.vocab_size)
        self.transfer.check_room(model)
        return config

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Stages the weights while generation continues, then pauses it until they are loaded.

        Raises:
            EngineError: loading failed; the engine samples nothing any more.
            StalledError: a step timed out, or requests did not finish in time; the engine samples nothing any more.
        """
        stream = iter(weights)
        try:
            self._check()
            self.update_pauses_s.append(self._publish(version, stream))
        except Exception as error:
            self._book.fail(error)
            for _ in stream:  # other ranks take part in every tensor
                pass
            if isinstance(error, EngineError | StalledError):
                raise
            what = f"{self.name} did not take the weights of version {version} and was stopped"
            raise EngineError(f"{what}: {str(error) or type(error).__name__}") from error
        except BaseException as interrupt:  # Ctrl-C reaches all ranks: none waits for this one's tensors
            self._book.fail(interrupt)
            raise
        self._book.pause(self.update_pauses_s[-1])
        self._book.version = version

    @abstractmethod
    def _publish(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> float:
        """Publishes `weights`; returns the seconds without generation. After an error nothing may be sampled."""

    @property
    def num_running(self) -> int:
        """Requests being generated, each of one or more samples."""
        return self._book.num_running

    def observe(self, spans: Spans) -> bool:
        self._book.lane = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)
        return True

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, a token is not in the vocabulary, or
                vLLM refuses a sampling parameter.
            EngineError: it broke, or was closed.
        """
        for request in requests:
            check_sampling("data.sampling", request.sampling, request.num_samples)
            check_request(request, self.max_model_len, self._vocab_size)
            if (request.sampling.head or 0) > self._vocab_size:
                raise ValueError(
                    f"data.sampling.head must be <= {self._vocab_size}, the vocabulary of model.model, with vLLM, got "
                    f"{request.sampling.head}"
                )
        self._check()
        self._launch(requests)

    def check_sampling(self, setting: str, sampling: SamplingParams, num_samples: int) -> None:
        check_sampling(setting, sampling, num_samples)

    @abstractmethod
    def _launch(self, requests: Sequence[GenerationRequest]) -> None:
        """Registers requests in the book and starts them."""

    def poll(self, timeout_s: float) -> list[Completion]:
        return self._book.take(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = set(request_ids)
        self._cancel(gone)
        self._book.drop(gone)

    @abstractmethod
    def _cancel(self, request_ids: set[int]) -> None:
        """Cancels those of these requests that run or are queued."""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises the recorded failure."""
        self._book.check()

    @property
    def busy_s(self) -> float:
        """Seconds in which requests were running, without weight updates."""
        return self._book.busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens reported so far; servers report finished requests only."""
        return self._book.num_tokens

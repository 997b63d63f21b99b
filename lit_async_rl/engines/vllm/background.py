"""What engines share that generate by themselves, in other processes: their book of requests, and failed updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.embedded.queue import check_request
from lit_async_rl.engines.vllm.request_book import RequestBook
from lit_async_rl.engines.vllm.weight_transfer import WeightTransfer
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_config

Transfer = TypeVar("Transfer", bound=WeightTransfer)


class BackgroundEngine(RolloutEngine, Generic[Transfer]):
    """A `RequestBook` stands between the threads that call and whatever generates.

    Subclasses say how requests start and end there (`_launch`, `_cancel`) and how weights get there (`_publish`). What
    breaks is written into the book; then every call from outside raises it, and nothing is sampled any more.

    Args:
        name: what generates, in messages.
        transfer: how weights get there.
        in_flight_weight_updates: False: all running requests finish first, under the old weights.
        clear_cache: whether running completions compute their keys and values again after an update.
    """

    def __init__(self, name: str, transfer: Transfer, in_flight_weight_updates: bool, clear_cache: bool) -> None:
        self.name, self.transfer = name, transfer
        self.in_flight_weight_updates, self.clear_cache = in_flight_weight_updates, clear_cache
        self.update_pauses_s: list[float] = []  # seconds without generation in each weight update
        self._book = RequestBook(name)
        self._max_model_len = self._vocab_size = 0

    def _read_config(self, model: str) -> Any:
        """The text model's configuration. Raises FileNotFoundError: there is no such model."""
        config: Any = load_config(model).get_text_config()
        self._vocab_size = int(config.vocab_size)
        return config

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and completion together."""
        return self._max_model_len

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Moves the weights while the old ones generate, then pauses generation until they are loaded.

        Raises:
            EngineError: they were not loaded; nothing is sampled any more.
            StalledError: a step took too long, or requests did not finish in time; the same holds.
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

    @abstractmethod
    def _publish(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> float:
        """Makes `weights` those to sample from; seconds without generation. After an error nothing may be sampled."""

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, or a token is not in the vocabulary.
            EngineError: it broke, or was closed.
        """
        for request in requests:
            check_request(request, self.max_model_len, self._vocab_size)
        self._check()
        self._launch(requests)

    @abstractmethod
    def _launch(self, requests: Sequence[GenerationRequest]) -> None:
        """Enters requests into the book and starts them."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """Samples that have finished; waits for the first."""
        return self._book.take(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends these requests and drops what they have."""
        gone = set(request_ids)
        self._cancel(gone)
        self._book.drop(gone)

    @abstractmethod
    def _cancel(self, request_ids: set[int]) -> None:
        """Ends those of these requests that run, or wait to."""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises what broke it."""
        self._book.check()

    @property
    def busy_s(self) -> float:
        """Seconds in which requests ran, weight updates not counted."""
        return self._book.busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, as far as reported; servers report finished requests only."""
        return self._book.num_tokens

"""Updates of the embedded engine's weights: how they arrive, and when they are applied.

In flight `load_weights` waits for nothing: the decode loop takes the weights before its next step. Without in-flight
updates it waits until one of two pending updates is applied; the loop, `close` and an error wake it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor

from lit_async_rl.engines.embedded.queue import RequestQueue, Update
from lit_async_rl.engines.embedded.self_check import check_decoding
from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.errors import StalledError
from lit_async_rl.models.received import apply_weights, receive_weights
from lit_async_rl.utils.locks import Room

MAX_PENDING = 2


class NewestUpdate:
    """Place of an update between the thread that brings it and the decode loop, which takes it before its next token.

    An update that was not taken is joined with the next, which may leave unchanged weights out. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._update: Update | None = None

    def put(self, update: Update) -> None:
        """Takes the place of an earlier update."""
        with self._lock:
            earlier = {} if self._update is None else self._update.weights
            self._update = Update(update.version, earlier | update.weights)

    def take(self) -> Update | None:
        """The update, which is gone then."""
        with self._lock:
            update, self._update = self._update, None
        return update


class WeightUpdates:
    """Version of an engine's weights, and the updates that wait. The engine's lock is held, except by `receive`.

    Args:
        in_flight: updates are applied before the next token; otherwise in the order of requests, and at most
            `MAX_PENDING` wait.
        timeout_s: timeout of the wait for one of these to be applied.
        self_check: check decoding once the first weights are there.

    Attributes:
        version: of the weights that are used.
        are_loaded: whether there are weights.
        room: places for updates that wait; the decode loop's errors close it.
    """

    def __init__(self, in_flight: bool, timeout_s: float, self_check: bool) -> None:
        self.in_flight, self._timeout_s, self._self_check = in_flight, timeout_s, self_check
        self.version, self.are_loaded = 0, True
        self.room = Room(MAX_PENDING)
        self._arrived = NewestUpdate()

    def receive(
        self, version: int, weights: Iterable[tuple[str, Tensor]], slots: Slots, num_queued: int
    ) -> Update | None:
        """Reads an update; None if the decode loop takes it before its next token.

        Raises:
            ValueError: names or shapes are not the model's.
            StalledError: older updates were not used in time.
        """
        if not self.in_flight and not self.room.wait(self._timeout_s):
            raise StalledError(
                f"the embedded engine used no update within data.engine.update_timeout_s={self._timeout_s:g}: "
                f"{num_queued} items queued, {slots.num_active} rows active"
            )
        update = Update(version, receive_weights(slots.lm, weights))
        if self.in_flight and self.are_loaded:
            self._arrived.put(update)  # the trainer does not wait for the merging of adapters either
            return None
        return update

    def apply_due(self, queue: RequestQueue, slots: Slots) -> None:
        """Applies what has arrived since the last token, and passes barriers that are reached."""
        if (update := self._arrived.take()) is not None:
            self.apply(update, slots)
        while (barrier := queue.take_barrier(slots.num_active)) is not None:
            if isinstance(barrier, Update):
                self.apply(barrier, slots)
                self.room.add(-1)
            else:
                slots.begin_batch(barrier.seed)

    def apply(self, update: Update, slots: Slots) -> None:
        """Uses these weights from now on."""
        apply_weights(slots.lm, update.weights, {name: linear.write for name, linear in slots.packed.items()})
        if self._self_check and not self.are_loaded:
            check_decoding(slots)
        self.version, self.are_loaded = update.version, True
        slots.forget_prompts()

    def forget(self) -> None:
        """Drops what has arrived and was not applied."""
        self._arrived.take()

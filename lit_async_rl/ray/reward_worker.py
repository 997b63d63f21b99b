"""The actor of a pool for rewards: calls the parts of the run's reward as the scorer would.

| where | what |
|---|---|
| event loop | `async` parts, all at once; answers |
| threads | plain parts, as many at a time as the pool sends |
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lit_async_rl.problem import Prompt, Score
from lit_async_rl.ray.pool import unpack_prompt
from lit_async_rl.ray.pool_worker import PoolWorker, closed, described
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import is_async
from lit_async_rl.rewards.forms import BatchedReward, wanted, wants
from lit_async_rl.runtime.guarded_calls import in_thread
from lit_async_rl.runtime.threads import ThreadPool
from lit_async_rl.utils.checks import as_reward

METRICS_S = 0.5  # between two answers with metrics, if calls of the part are under way
PROGRESS_S = 0.5  # between two notes that a call gets on


class RewardWorker(PoolWorker):
    """Calls rewards.

    Args:
        parts: by name: pickled when this actor is made, in the trainer's process.
        num_threads: calls of plain parts at a time.
    """

    def __init__(self, parts: Mapping[str, Any], num_threads: int) -> None:
        super().__init__()
        self._parts = parts
        self._threads = ThreadPool(num_threads, name="reward")
        self._num_running: Counter[str] = Counter()  # by part
        self._restored: Counter[str] = Counter()  # number of the last state, by part
        self._told: dict[str, float] = {}  # when metrics were last sent, by part
        self._metrics_restored: dict[str, dict[str, float]] = {}  # those that a state brought, by part

    async def prepare(self, folder: str | None) -> None:
        """Tells the rewards the run's folder, if there is one."""
        if folder is not None:
            await self.use_folder(folder)

    async def use_folder(self, folder: str) -> dict[str, Any]:
        """Tells the rewards the folder of this or the next run."""
        for part in self._parts.values():
            hooks.use_folder(part, Path(folder))
        return {}

    async def call(
        self,
        name: str,
        prompts: Sequence[Mapping[str, Any]],
        completions: Sequence[str],
        token_ids: Sequence[int],
        is_group: bool,
        start: Mapping[str, Any] | None,
        *,
        begun: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Rewards of completions, as plain data.

        Args:
            name: of the part.
            prompts: packed; one for each completion, or one for a group.
            completions: one, a batch, or those of a group.
            token_ids: of a single completion.
            is_group: whether they are scored together.
            start: `state` that the part goes on from, and its `number`: the first call with it restores it before it
                scores. None changes nothing.
            begun: passed to a part that says when it begins.
        """
        part = self._parts[name]
        owner = hooks.owner_of(part)
        if start is not None and start["number"] != self._restored[name]:
            self._restored[name] = start["number"]
            owner.restore_state(start["state"])
            self._metrics_restored[name] = _metrics(owner)
        self._num_running[name] += 1
        answer: dict[str, Any]
        try:
            unpacked = [unpack_prompt(one) for one in prompts]
            values = await self._values(
                part, unpacked, completions, token_ids=token_ids, is_group=is_group, begun=begun
            )
            answer = {"values": [_packed(value) for value in values]}
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            answer = {"error": described(error)}
        finally:
            self._num_running[name] -= 1
        if hasattr(owner, "save_state"):
            answer["state"] = dict(owner.save_state())
        now = time.monotonic()
        # the last answer for now has them, too: nothing else would bring what the last calls have cost
        is_due = self._num_running[name] == 0 or now - self._told.get(name, 0.0) > METRICS_S
        if hasattr(owner, "metrics") and is_due:
            self._told[name] = now
            answer["metrics"] = _metrics(owner)
            answer["restored"] = self._metrics_restored.get(name, {})
        return answer

    async def call_in_turn(self, *args: Any) -> AsyncIterator[dict[str, Any]]:
        """As `call`, of a part with a queue of its own: yields when the work begins or gets on, and then the answer."""
        loop = asyncio.get_running_loop()
        got_on = asyncio.Event()

        def begin() -> None:
            loop.call_soon_threadsafe(got_on.set)

        call = loop.create_task(self.call(*args, begun=begin))
        try:
            has_begun = False
            while not (has_begun and call.done()):
                waiting = loop.create_task(got_on.wait())
                try:
                    await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                if not has_begun or not call.done():
                    has_begun = True
                    got_on.clear()
                    yield {}
                    await asyncio.wait({call}, timeout=PROGRESS_S)
            yield await call
        finally:
            call.cancel()

    async def _values(
        self,
        part: Any,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        *,
        token_ids: Sequence[int],
        is_group: bool,
        begun: Callable[[], None] | None,
    ) -> list[Any]:
        tells = {"begun": begun} if begun is not None and wants(part.score_group if is_group else part, "begun") else {}
        call: Callable[[], Any]
        if isinstance(part, BatchedReward):
            call = partial(part.values, list(prompts), list(completions))
        elif is_group:
            call = partial(part.score_group, prompts[0], tuple(completions), **tells)
        else:
            ids = wanted(part, token_ids=tuple(token_ids))
            call = partial(part, prompts[0], completions[0], **ids, **tells)
        found = call() if is_async(part) else await in_thread(self._threads, call)
        found = await found if inspect.isawaitable(found) else found
        return list(found) if is_group or isinstance(part, BatchedReward) else [found]

    async def stop(self) -> dict[str, Any]:
        """Closes the rewards; then the actor may be killed."""
        closes = [getattr(hooks.owner_of(part), "close", None) for part in self._parts.values()]
        answers = [await closed(asyncio.to_thread(close)) for close in closes if close is not None]
        return next(filter(None, answers), {})


def _metrics(owner: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in owner.metrics().items()} if hasattr(owner, "metrics") else {}


def _packed(value: Any) -> Any:
    """A reward as plain data: a number, None, a number with its parts, or what is wrong with it."""
    if value is None:
        return None
    try:
        number = as_reward(value)
        if isinstance(value, Score):
            return {"value": number, "parts": {str(name): float(part) for name, part in value.parts.items()}}
    except (TypeError, ValueError) as error:
        return {"wrong": str(error)[:1000]}
    return number

"""The actor of a pool for rewards: it calls the parts of the run's reward, each as the scorer would.

| where | what |
|---|---|
| event loop | `async` parts, all at once; answers |
| threads | plain parts, as many at a time as the pool sends |
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lit_async_rl.ray.pool import unpack_prompt
from lit_async_rl.ray.pool_worker import PoolWorker, described
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.forms import BatchedReward, wants, wants_token_ids
from lit_async_rl.rewards.scorer import is_async
from lit_async_rl.runtime.guarded_calls import in_thread
from lit_async_rl.types import Prompt, Score
from lit_async_rl.utils.checks import as_reward

METRICS_S = 0.5  # between two answers with metrics, if calls of the part are under way
BEGUN_S = 5.0  # for which `begun` waits
NUM_CANCELLED = 10_000  # remembered: a cancellation may overtake its call


class RewardWorker(PoolWorker):
    """Calls rewards.

    Args:
        parts: by name: pickled when this actor is made, in the trainer's process.
        num_threads: calls of plain parts at a time.
        folder: of the run; None without one.
    """

    def __init__(self, parts: Mapping[str, Any], num_threads: int, folder: str | None) -> None:
        super().__init__()
        self._parts = parts
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")
        self._folder = folder
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._num_running: Counter[str] = Counter()  # by part
        self._cancelled: deque[int] = deque(maxlen=NUM_CANCELLED)
        self._told: dict[str, float] = {}  # when metrics were last sent, by part
        self._begun: list[int] = []  # calls, not reported yet
        self._has_begun = asyncio.Event()

    async def prepare(self) -> None:
        """Tells the rewards the run's folder."""
        if self._folder is not None:
            self._use(self._folder)

    async def use_folder(self, folder: str) -> dict[str, Any]:
        """Tells the rewards the folder of the next run."""
        self._use(folder)
        return {}

    def _use(self, folder: str) -> None:
        for part in self._parts.values():
            if (use := getattr(hooks.owner_of(part), "use_folder", None)) is not None:
                use(Path(folder))

    async def call(
        self,
        number: int,
        name: str,
        prompts: Sequence[Mapping[str, Any]],
        completions: Sequence[str],
        token_ids: Sequence[int],
        is_group: bool,
        state: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Rewards of completions, as plain data.

        Args:
            number: of the call.
            name: of the part.
            prompts: packed; one for each completion, or one for a group.
            completions: one, a batch, or those of a group.
            token_ids: of a single completion.
            is_group: whether they are to be scored together.
            state: that the part is to go on from, before this call; None changes nothing.
        """
        if number in self._cancelled:
            return {"error": described(asyncio.CancelledError("it was cancelled before it began"))}
        part = self._parts[name]
        owner = hooks.owner_of(part)
        if state is not None:
            owner.restore_state(state)
        task = asyncio.get_running_loop().create_task(
            self._values(
                part,
                number,
                [unpack_prompt(one) for one in prompts],
                completions=completions,
                token_ids=token_ids,
                is_group=is_group,
            )
        )
        self._running[number] = task
        self._num_running[name] += 1
        answer: dict[str, Any]
        try:
            await asyncio.wait({task})
            answer = {"values": [_packed(value) for value in task.result()]}
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            answer = {"error": described(error)}
        finally:
            self._running.pop(number, None)
            self._num_running[name] -= 1
        if hasattr(owner, "save_state"):
            answer["state"] = dict(owner.save_state())
        now = time.monotonic()
        # the last answer for now has them, too: nothing else would bring what the last calls have cost
        is_due = self._num_running[name] == 0 or now - self._told.get(name, 0.0) > METRICS_S
        if hasattr(owner, "metrics") and is_due:
            self._told[name] = now
            answer["metrics"] = {str(key): float(value) for key, value in owner.metrics().items()}
        return answer

    async def _values(
        self,
        part: Any,
        number: int,
        prompts: list[Prompt],
        completions: Sequence[str],
        token_ids: Sequence[int],
        is_group: bool,
    ) -> list[Any]:
        begun: dict[str, Any] = {}
        if wants(part.score_group if is_group else part, "begun"):
            loop = asyncio.get_running_loop()
            begun = {"begun": lambda: loop.call_soon_threadsafe(self._note_begun, number)}
        call: Callable[[], Any]
        if isinstance(part, BatchedReward):
            return await self._in_thread(partial(part.values, prompts, list(completions)))
        if is_group:
            call = partial(part.score_group, prompts[0], tuple(completions), **begun)
            found = call() if is_async(part) else await self._in_thread(call)
            return list(await found if inspect.isawaitable(found) else found)
        ids = {"token_ids": tuple(token_ids)} if wants_token_ids(part) else {}
        call = partial(part, prompts[0], completions[0], **ids, **begun)
        if is_async(part):
            return [await call()]
        value = await self._in_thread(call)
        return [await value if inspect.isawaitable(value) else value]

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await in_thread(self._threads, call)

    def _note_begun(self, number: int) -> None:
        self._begun.append(number)
        self._has_begun.set()

    async def begun(self) -> dict[str, Any]:
        """Calls whose work has begun since the last time; waits at most `BEGUN_S` for the first."""
        try:
            await asyncio.wait_for(self._has_begun.wait(), BEGUN_S)
        except asyncio.TimeoutError:
            return {"begun": []}
        found = self._begun
        self._begun = []
        self._has_begun.clear()
        return {"begun": found}

    async def cancel(self, number: int) -> dict[str, Any]:
        """Cancels a call of an `async` part."""
        self._cancelled.append(number)
        if (task := self._running.get(number)) is not None:
            task.cancel()
        return {}

    async def stop(self) -> dict[str, Any]:
        """Closes the rewards; then the actor may be killed."""
        for part in self._parts.values():
            if (close := getattr(hooks.owner_of(part), "close", None)) is not None:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, close)
                except Exception as error:
                    return {"warning": f"raised {type(error).__name__}: {error}"}
        return {}


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

"""Forms of reward functions: one completion at a time, batches, and TRL's form."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.waiting import clock
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.elsewhere import RemoteProxy

MAX_BATCH_SIZE = 16
LOOK_INTERVAL_S = 0.2  # until a call that waits for a batch notices that it was abandoned
NAMES = ("prompt", "completion")
BATCH_NAMES = ("prompts", "completions")
_Call = tuple[Prompt, str, Future[Any]]


def wants(reward: Callable[..., Any], parameter: str) -> bool:
    """Whether a reward has a parameter of this name, and is called with its value."""
    return parameter in _parameters(reward)


def wanted(reward: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those arguments, such as `token_ids`, for which a reward has parameters."""
    parameters = _parameters(reward)
    return {name: value for name, value in offered.items() if name in parameters}


def as_reward_function(reward: Callable[..., Any], answer_field: str | None = None) -> Callable[..., Any]:
    """Converts a reward, whose parameters show its form, to a function of one completion.

    | parameters | form |
    |---|---|
    | `(prompt, completion)` | one completion; returned as it is |
    | `(completion, prompt)`, of a function | the same, called by keyword |
    | `(prompts, completions)` | a batch: lists of `Prompt` and text, see `BatchedReward` |
    | `(completions, **columns)`, `(prompts, completions, answer, **kwargs)` and so on | TRL's, see `TRLReward` |

    Args:
        reward: function or callable object.
        answer_field: name of the reference answer for a reward in TRL's form, besides `answer`.

    Raises:
        ValueError: a callable object has the completion first.
    """
    parameters = _parameters(reward)
    if "completions" not in parameters:
        if not _in_other_order(parameters, NAMES):
            return reward
        if not inspect.isroutine(reward):
            raise ValueError(
                f"{type(reward).__name__} has the parameters {inspect.signature(reward)}, but a reward is called with "
                "the prompt first, as reward(prompt, completion): swap the two parameters"
            )
        return _ByKeyword(reward)
    takes_columns = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if takes_columns or "prompts" not in parameters or not required <= set(BATCH_NAMES):
        return TRLReward(reward, answer_field)
    return BatchedReward(reward)


class _ByKeyword(RemoteProxy):
    """Stands for a function `(completion, prompt)`, by its name and identity."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.__signature__ = inspect.signature(original)

    def __call__(self, prompt: Prompt, completion: str, **others: Any) -> Any:
        return self.original(prompt=prompt, completion=completion, **others)


def _in_other_order(parameters: dict[str, inspect.Parameter], names: tuple[str, str]) -> bool:
    """Whether there are two parameters of these names, but not where a call by position would put them."""
    named = {name for name, one in parameters.items() if one.kind is not one.POSITIONAL_ONLY}
    return set(names) <= named and tuple(parameters)[:2] != names


class BatchedReward:
    """A reward function of batches, `reward(prompts, completions) -> list`, for a model that scores many at once.

    A batch has the completions that wait at that moment, of one or several groups. One batch is scored at a time. None
    means that the reward does not apply to a completion, see `CombinedReward`.

    Args:
        reward: function from a list of `Prompt` and a list of texts to as many numbers.
        max_batch_size: most completions in a batch. `data.scoring.workers` is increased to it, because one worker waits
            for each completion.
    """

    def __init__(self, reward: Callable[..., Any], max_batch_size: int = MAX_BATCH_SIZE) -> None:
        check_range("BatchedReward", "integer >= 1", max_batch_size=max_batch_size)
        self.reward = reward
        self.max_batch_size = max_batch_size
        # held while a batch is scored; the calls waiting for it form the next one. A new one after `abandon_batch`
        self._batch_lock = threading.Lock()
        self._began: float | None = None  # start of the running batch
        self._queue_lock = threading.Lock()  # of the list of waiting calls; never held while a batch is scored
        self._waiting: list[_Call] = []

    def __reduce__(self) -> Any:
        """Locks and waiting calls stay here."""
        return type(self), (self.reward, self.max_batch_size)

    def __call__(self, prompt: Prompt, completion: str) -> Any:
        """Value of the completion. Blocks until its batch is scored; the scorer limits the wait."""
        future = Future[Any]()
        waiting: _Call = (prompt, completion, future)
        with self._queue_lock:
            self._waiting.append(waiting)
        # once it no longer waits, it is in a batch, which another worker scores; if that batch was abandoned, only the
        # worker that left with it can still answer
        while self._is_waiting(waiting):
            lock = self._batch_lock
            if not lock.acquire(timeout=LOOK_INTERVAL_S):
                continue
            try:
                # more calls may wait before it than fit in one batch
                if lock is self._batch_lock and self._is_waiting(waiting):
                    self._began = clock.now()
                    self._score_batch()
            finally:
                if lock is self._batch_lock:
                    self._began = None
                lock.release()
        return future.result()

    def _is_waiting(self, call: _Call) -> bool:
        with self._queue_lock:
            return any(one is call for one in self._waiting)

    def abandon_batch(self, age_s: float) -> None:
        """Lets others be scored while a batch has not returned for `age_s`, and may never."""
        began = self._began
        if began is not None and clock.now() - began >= age_s:
            self._began = None
            self._batch_lock = threading.Lock()

    def _score_batch(self) -> None:
        with self._queue_lock:
            batch = self._waiting[: self.max_batch_size]
            del self._waiting[: self.max_batch_size]
        if not batch:  # the worker of a batch that was abandoned at this moment has taken them
            return
        try:
            values = self.values([prompt for prompt, _, _ in batch], [completion for _, completion, _ in batch])
        except BaseException as error:
            for _, _, future in batch:
                future.set_exception(error)
            return
        for (_, _, future), value in zip(batch, values, strict=True):
            future.set_result(value)

    def values(self, prompts: list[Prompt], completions: list[str]) -> list[Any]:
        """Calls the function on one batch.

        Raises:
            TypeError: it did not return a list of values.
            ValueError: it did not return one value per completion.
        """
        result = self._call(prompts, completions)
        try:
            values = list(result)
        except TypeError:
            raise TypeError(f"the reward returned {result!r:.200}, which is not a list of rewards") from None
        if len(values) != len(completions):
            raise ValueError(f"returned {len(values)} rewards for {len(completions)} completions")
        return values

    def _call(self, prompts: list[Prompt], completions: list[str]) -> Any:
        if _in_other_order(_parameters(self.reward), BATCH_NAMES):
            return self.reward(prompts=prompts, completions=completions)
        return self.reward(prompts, completions)


class TakesAnswerField:
    """A reward that is told the name of the reference answer, see `name_answers`.

    Attributes:
        answer_field: second name of the answer among the columns of a reward in TRL's form.
    """

    answer_field: str | None = None


class TRLReward(BatchedReward, TakesAnswerField):
    """A reward function in the form of TRL's `GRPOTrainer`: `reward(completions, **columns) -> list`.

    It is called with those keyword arguments, each a list with one entry per completion, for which it has parameters
    (or `**kwargs`): `prompts` and `completions` (texts, or lists of messages if the prompts are conversations),
    `answer`, and the other fields of the prompts' records, unconverted: a number stays one. TRL's `completion_ids`,
    `trainer_state`, `log_extra` and `log_metric` are not supported.

    Args:
        reward: reward function.
        answer_field: second name of the reference answer, besides `answer`.
        max_batch_size: see `BatchedReward`.
    """

    def __init__(
        self, reward: Callable[..., Any], answer_field: str | None = None, max_batch_size: int = MAX_BATCH_SIZE
    ) -> None:
        super().__init__(reward, max_batch_size)
        self.answer_field = answer_field
        parameters = _parameters(reward).values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        self._required = {
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }

    def __reduce__(self) -> Any:
        return type(self), (self.reward, self.answer_field, self.max_batch_size)

    def _call(self, prompts: list[Prompt], completions: list[str]) -> Any:
        is_chat = any(prompt.messages is not None for prompt in prompts)
        columns: dict[str, list[Any]] = {}
        for name in sorted({name for prompt in prompts for name in prompt.metadata}):
            columns[str(name)] = [prompt.metadata.get(name) for prompt in prompts]
        columns["answer"] = [one.answer if one.answer_value is None else one.answer_value for one in prompts]
        if self.answer_field is not None:
            columns[self.answer_field] = columns["answer"]
        columns["prompts"] = [_messages(prompt) if is_chat else prompt.text for prompt in prompts]
        columns["completions"] = [[{"role": "assistant", "content": text}] if is_chat else text for text in completions]
        if missing := sorted(self._required - set(columns)):
            known = ", ".join(sorted(columns))
            raise TypeError(f"needs {', '.join(missing)}, but the prompts have {known}")
        given = {name: column for name, column in columns.items() if self._takes_all or name in self._names}
        return self.reward(**given)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if prompt.messages is None:
        return [{"role": "user", "content": prompt.text}]
    return [dict(message) for message in prompt.messages]


def _parameters(reward: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a reward by name; empty for C functions without a signature."""
    try:
        return dict(inspect.signature(reward).parameters)
    except (TypeError, ValueError):
        return {}

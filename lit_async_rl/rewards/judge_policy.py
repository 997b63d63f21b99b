"""The policy in training as a judge, on the engine that samples its rollouts: `PolicyModel`.

What answers is `PolicyQuestions` of the run's producer, which gives itself to the rewards that want it at the start of
a fit (see `hooks`), and takes itself away at its end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from lit_async_rl.errors import FinalRewardError, RewardSetupError
from lit_async_rl.rewards.judge_models import Answer, Turn
from lit_async_rl.types import SamplingParams

POLICY = "policy"  # in place of an engine: that of the run


NO_POLICY = (
    f"JudgeReward.engine={POLICY} asks the policy in training, on the engine of a fit, and there is none here: outside "
    "of training, and for a reward in a process of its own or of a monitor, use another judge"
)


class NoPolicyError(RewardSetupError):
    """There is no fit whose policy could be asked: none was begun in this process, or it has ended."""

    def __init__(self, message: str = NO_POLICY) -> None:  # scorers make it anew, with the prompt in the message
        super().__init__(message)


@runtime_checkable
class Policy(Protocol):
    """What answers with the newest weights that the run's engine has, from any thread."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens of its tokenizer."""
        ...

    def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams,
        future: concurrent.futures.Future[Answer],
    ) -> None:
        """Submits a question; `future` gets the answer, or the error. May wait for the producer's lock."""
        ...

    def abandon(self, future: concurrent.futures.Future[Answer]) -> None:
        """Takes a question back, if it has no answer yet."""
        ...


class PolicyModel:
    """Asks the policy in training.

    Args:
        sampling: of the answers.
        on_request: called before each request; may refuse it by raising.
        on_answer: called with each answer and its latency in seconds.

    Attributes:
        policy: answers; None outside of a fit.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        on_request: Callable[[bool], None],
        on_answer: Callable[[Answer, float], None],
    ) -> None:
        self._sampling = sampling
        self._on_request = on_request
        self._on_answer = on_answer
        self.policy: Policy | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Those of the policy's tokenizer."""
        return () if self.policy is None else self.policy.special_tokens

    async def open(self) -> None:
        """Nothing is to be loaded."""

    async def close(self) -> None:
        """Nothing is held."""

    async def ask(self, messages: Sequence[Mapping[str, str]], turn: Turn, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        policy = self.policy
        if policy is None:
            raise NoPolicyError
        self._on_request(True)
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        try:
            # In a thread: the producer's lock may be held while its engine takes requests, and other questions go on.
            await loop.run_in_executor(None, policy.ask, messages, self._sampling, future)
            answer = await asyncio.wait_for(asyncio.wrap_future(future), max(0.001, deadline - loop.time()))
        except (TimeoutError, asyncio.TimeoutError):
            raise FinalRewardError("the policy did not answer as a judge within JudgeLimits.timeout_s") from None
        finally:
            if future.cancel() or future.cancelled():
                loop.run_in_executor(None, policy.abandon, future)
        self._on_answer(answer, time.monotonic() - began)
        return answer

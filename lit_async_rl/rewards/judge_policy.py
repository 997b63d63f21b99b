"""The policy in training as a judge, on the engine that samples its rollouts: `PolicyModel`.

Questions are answered by the producer's `PolicyQuestions`, which attaches itself to rewards that want it at the start
of a fit (see `hooks`) and detaches itself at the end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from lit_async_rl.errors import FinalRewardError, RewardSetupError
from lit_async_rl.rewards.judge_models import Answer, Permit
from lit_async_rl.types import SamplingParams

POLICY = "policy"  # in place of an engine: the run's own


NO_POLICY = (
    f"JudgeReward.engine={POLICY} asks the policy in training, on the engine of a fit, and there is none here: outside "
    "of training, and for a reward in a process of its own or of a monitor, use another judge"
)


class NoPolicyError(RewardSetupError):
    """No fit is running in this process, so there is no policy to ask."""

    def __init__(self, message: str = NO_POLICY) -> None:  # scorers rebuild it with the prompt in the message
        super().__init__(message)


@runtime_checkable
class Policy(Protocol):
    """Answers with the newest weights of the run's engine; callable from any thread."""

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
        """Submits a question; `future` receives the answer or the error. May block on the producer's lock."""
        ...

    def abandon(self, future: concurrent.futures.Future[Answer]) -> None:
        """Withdraws a question that has no answer yet."""
        ...


class PolicyModel:
    """Asks the policy in training.

    Args:
        sampling: parameters for the answers.
        on_request: called before each request; may refuse it by raising.
        on_answer: called with each answer and its latency in seconds.

    Attributes:
        policy: answers the questions; None outside a fit.
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
        """Special tokens of the policy's tokenizer."""
        return () if self.policy is None else self.policy.special_tokens

    async def open(self) -> None:
        """Does nothing: there is nothing to load."""

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""

    async def ask(self, messages: Sequence[Mapping[str, str]], permit: Permit, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        policy = self.policy
        if policy is None:
            raise NoPolicyError
        self._on_request(True)
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        try:
            # In a thread, so that other questions proceed while the producer's lock is held.
            await loop.run_in_executor(None, policy.ask, messages, self._sampling, future)
            answer = await asyncio.wait_for(asyncio.wrap_future(future), max(0.001, deadline - loop.time()))
        except (TimeoutError, asyncio.TimeoutError):
            raise FinalRewardError("the policy did not answer as a judge within JudgeLimits.timeout_s") from None
        finally:
            if future.cancel() or future.cancelled():
                loop.run_in_executor(None, policy.abandon, future)
        self._on_answer(answer, time.monotonic() - began)
        return answer

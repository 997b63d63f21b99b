"""Rules that a call may set for its replies: forced tool calls, and a format of the content.

Nothing is masked while a reply is sampled. A reply that breaks the rule does not train, and is sampled again after the
same tokens, with at most `MAX_TRIES` tries in all. Let A be the set of valid replies, pi the policy, and Z = pi(A). A
reply y that is kept has the distribution `pi(y | A) = pi(y) / Z`, and trains with the log-probability that was
recorded, `log pi(y)`. As `grad log Z = E[grad log pi(y) | A]`, its expected gradient is

    E[(R - b) grad log pi(y) | A] = grad E[R | A] + (E[R | A] - b) grad log Z.

If b is the mean reward of the group's other samples, the last term is 0 for the first call of an episode: the gradient
is exactly that of the policy conditioned on A. At a later call, E[R | A] depends on the conversation so far, and the
term makes valid replies likelier where the episode goes better than b, and rarer where it goes worse. Importance ratios
of stale tokens are those of pi: they lack the factor Z(old) / Z(new) of the conditioned policy. A call without a valid
reply contributes no gradient, so nothing else teaches the policy to keep the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lit_async_rl.agents.calls import Reply

MAX_TRIES = 10
ContentCheck = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class ReplyRule:
    """Condition on a reply.

    Attributes:
        functions: it must call at least one of these, and no other; None demands no call.
        max_tool_calls: most tool calls of a reply; None sets no limit.
        content: finds the fault of the content of a reply without tool calls; None accepts every content.
    """

    functions: frozenset[str] | None = None
    max_tool_calls: int | None = None
    content: ContentCheck | None = None

    def fault(self, reply: Reply) -> str | None:
        """How a reply breaks the rule; None if it keeps it."""
        calls = reply.message.tool_calls
        if self.functions is not None:
            if not calls:
                return f"it calls none of {', '.join(sorted(self.functions))}"
            other = next((call.name for call in calls if call.name not in self.functions), None)
            if other is not None:
                return f"it calls {other[:80]!r}, which is none of {', '.join(sorted(self.functions))}"
        if self.max_tool_calls is not None and len(calls) > self.max_tool_calls:
            return f"it has {len(calls)} tool calls, and may have {self.max_tool_calls}"
        return self.content(reply.message.content) if self.content is not None and not calls else None

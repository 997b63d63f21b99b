"""The graph of an episode's messages: each message once, each turn of the policy with the tokens that it sampled.

Messages are the nodes of a tree, a conversation is a path from its root. A call continues the longest path that its
messages share with the graph: the ids recorded there are its context, and only what is new is tokenised. Conversations
with different tools or template arguments have trees of their own, because their first tokens differ.

A call that cannot continue a path although its messages do is a *drift*, counted by its cause:

| counter | what has happened |
|---|---|
| `template` | the chat template wrote earlier messages differently than before |
| `tokens` | the agent sent token ids that spell what was sampled, in other tokens |
| `other` | the agent has changed a turn of the policy |

A message of the assistant that differs from the sampled turn in reasoning, whitespace or the form of its JSON alone is
no drift: the sampled tokens are kept (`healed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lit_async_rl.agents.rendering import Message, message_key
from lit_async_rl.types import Completion


@dataclass(eq=False)
class SampledTurn:
    """A turn of the policy, and the tokens given to it since the turn before.

    Attributes:
        parent: the turn whose conversation it continues; None if it begins one.
        given_ids: token delta of the messages since then.
        given_text: their rendering.
        completion: tokens, log-probabilities, versions, head and experts of the turn.
        call: number of its call within the episode.
        is_side: whether its call is a side call.
        is_kept: whether its reply has reached the agent.
        num_continued: turns that continue it.
        system: system prompt of its conversation; empty without one.
    """

    parent: SampledTurn | None
    given_ids: tuple[int, ...]
    given_text: str
    completion: Completion
    call: int
    is_side: bool = False
    is_kept: bool = False
    num_continued: int = 0
    system: str = ""

    @property
    def path(self) -> list[SampledTurn]:
        """The turns of the conversation up to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the conversation, up to the end of this turn."""
        return tuple(token for turn in self.path for token in (*turn.given_ids, *turn.completion.token_ids))


@dataclass(eq=False)
class MessageNode:
    """A message; `turn` is set if the policy sampled it."""

    key: str = ""
    message: Message | None = None
    turn: SampledTurn | None = None
    children: dict[str, list[MessageNode]] = field(default_factory=dict)

    def child(self, message: Message, turn: SampledTurn | None = None) -> MessageNode:
        """The child with this message; a new one if there is none yet, or if the policy sampled it."""
        key = message_key(message)
        known = self.children.setdefault(key, [])
        if turn is None and known:
            return _newest(known)
        known.append(MessageNode(key=key, message=message, turn=turn))
        return known[-1]

    @property
    def has_turns(self) -> bool:
        """Whether the policy was asked to go on after this message."""
        return any(child.turn is not None for same in self.children.values() for child in same)


@dataclass
class Match:
    """How far a call's messages follow the graph.

    Attributes:
        node: the last message that is in the graph already; the root if none is.
        length: number of messages up to it.
        turns: turns of the policy that the call continues, with their positions in the messages.
        num_healed: those of them that the messages write differently.
        is_edited: whether the next message stands in the place of a turn of the policy, and is none.
    """

    node: MessageNode
    length: int = 0
    turns: list[tuple[int, SampledTurn]] = field(default_factory=list)
    num_healed: int = 0
    is_edited: bool = False

    @property
    def last(self) -> SampledTurn | None:
        """The turn that the call continues."""
        return self.turns[-1][1] if self.turns else None


@dataclass
class DriftCounts:
    """Calls whose messages continue a conversation whose ids they could not continue, by cause; see the module."""

    template: int = 0
    tokens: int = 0
    other: int = 0
    healed: int = 0

    @property
    def total(self) -> int:
        """Number of drifts."""
        return self.template + self.tokens + self.other

    def add(self, more: DriftCounts) -> None:
        """Adds the counts of another episode."""
        self.template += more.template
        self.tokens += more.tokens
        self.other += more.other
        self.healed += more.healed


class MessageGraph:
    """Messages and turns of one episode. Not thread-safe.

    Attributes:
        turns: all turns of the policy, in the order in which they came.
        drift: see the module.
    """

    def __init__(self) -> None:
        self.turns: list[SampledTurn] = []
        self.drift = DriftCounts()
        self._roots: dict[str, MessageNode] = {}

    def match(self, kind: str, messages: Sequence[Message]) -> Match:
        """Follows messages from the root of their `kind`: tools and template arguments."""
        found = Match(self._roots.setdefault(kind, MessageNode()))
        sampled: list[tuple[int, MessageNode, Message]] = []
        for number, message in enumerate(messages):
            children = found.node.children.get(message_key(message))
            if not children:
                found.is_edited = message["role"] == "assistant" and found.node.has_turns
                break
            found.node = _newest(children)
            found.length = number + 1
            if found.node.turn is not None:
                sampled.append((number, found.node, message))
        if sampled and sampled[-1][1].turn is not None:
            path = sampled[-1][1].turn.path  # without turns from before a fork
            of_path = [(n, node, message) for n, node, message in sampled if node.turn in path]
            found.turns = [(n, node.turn) for n, node, _ in of_path if node.turn is not None]
            found.num_healed = sum(not _is_same(node.message, message) for _, node, message in of_path)
        return found

    def add(self, match: Match, messages: Sequence[Message], reply: Message, turn: SampledTurn) -> None:
        """Adds a turn that follows these messages, of which `match` was found when they came."""
        node = match.node
        for message in messages[match.length :]:
            node = node.child(message)
        node.child(reply, turn)
        self.record(turn)

    def record(self, turn: SampledTurn) -> None:
        """Adds a turn that follows no messages, but tokens."""
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.num_continued += 1

    def nodes(self) -> Iterator[MessageNode]:
        """All messages, each once."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.message is not None:
                yield node
            waiting += [child for same in node.children.values() for child in same]


def _newest(children: Sequence[MessageNode]) -> MessageNode:
    """Of turns that say the same the latest that the agent has read."""
    kept = [child for child in children if child.turn is None or child.turn.is_kept]
    return (kept or children)[-1]


def _is_same(recorded: Message | None, sent: Message) -> bool:
    """Whether a message of the assistant was sent back as it was given, ids of tool calls aside."""
    if recorded is None:
        return False
    calls = [[call["function"] for call in one.get("tool_calls", ())] for one in (recorded, sent)]
    return recorded["content"] == sent["content"] and calls[0] == calls[1]

"""The graph of an episode's messages: each message once, each turn of the policy with the tokens that it sampled.

Messages are the nodes of a tree, a conversation is a path from its root. A call continues the longest path that its
messages share with the graph: the ids recorded there are its context, and only what is new is tokenised. Conversations
with different tools or template arguments have different trees, because their first tokens differ.

A call that cannot continue a path although its messages do is a *drift*, counted by cause:

| counter | what has happened |
|---|---|
| `template` | the chat template wrote earlier messages differently than before |
| `tokens` | the agent sent token ids that spell what was sampled, in other tokens |
| `other` | the agent has changed a turn of the policy, or left out the stop string that ended it |

An assistant's message that differs from the sampled turn only in reasoning, whitespace or the form of its JSON is no
drift: the sampled tokens are kept (`healed`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lit_async_rl.agents.rendering import Message, message_key
from lit_async_rl.types import Completion


@dataclass(eq=False)
class SampledTurn:
    """A turn of the policy, and the tokens given to it since the turn before.

    Attributes:
        parent: the turn that it continues; None if it begins a conversation.
        given_ids: token delta of the messages since then.
        given_text: their rendering.
        completion: tokens, log-probabilities, versions, head and experts of the turn.
        call: number of its call within the episode.
        is_side: whether its call is a side call.
        is_kept: whether its reply has reached the agent.
        is_discarded: whether no later call may continue it.
        system: system prompt of its conversation; empty without one.
    """

    parent: SampledTurn | None
    given_ids: tuple[int, ...]
    given_text: str
    completion: Completion
    call: int
    is_side: bool = False
    is_kept: bool = False
    is_discarded: bool = False
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
    """A message; `turn` is set if the policy sampled it. The policy may say the same several times."""

    parent: MessageNode | None = None
    message: Message = field(default_factory=dict)
    turn: SampledTurn | None = None
    children: dict[str, list[MessageNode]] = field(default_factory=dict)

    def same(self, key: str, message: Message) -> list[MessageNode]:
        """The children that say the same as a message: turns of the policy, and messages equal to it."""
        known = self.children.get(key, ())
        return [child for child in known if child.turn is not None or child.message == message]

    def child(self, key: str, message: Message, turn: SampledTurn | None = None) -> MessageNode:
        """The child with this message; a new one if there is none, or if the policy sampled it."""
        known = self.children.setdefault(key, [])
        equal = [child for child in known if child.turn is None and child.message == message]
        if turn is None and equal:
            return equal[0]
        known.append(MessageNode(parent=self, message=message, turn=turn))
        return known[-1]

    @property
    def path(self) -> list[MessageNode]:
        """The messages up to this one, without the root."""
        nodes = []
        node: MessageNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def has_turns(self) -> bool:
        """Whether the policy was asked to go on after this message."""
        return any(child.turn is not None for same in self.children.values() for child in same)


@dataclass
class Match:
    """How far a call's messages follow the graph.

    Attributes:
        node: the last message in the graph already; the root if none is.
        length: number of messages up to it.
        turns: turns of the policy that the call continues, with their positions in the messages.
        num_healed: those of them that the messages write differently.
        is_edited: whether the next message replaces a turn of the policy.
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
    """Drifts by cause, and healed turns; see the module."""

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
        turns: all turns of the policy in order of arrival, also those that follow token ids instead of messages.
        drift: see the module.
    """

    def __init__(self) -> None:
        self.turns: list[SampledTurn] = []
        self.drift = DriftCounts()
        self._roots: dict[str, MessageNode] = {}

    def match(self, kind: str, messages: Sequence[Message], keys: Sequence[str]) -> Match:
        """Follows messages from the root of their `kind`: tools and template arguments.

        Args:
            kind: see `kind_of`.
            messages: of a call.
            keys: see `message_key`; made once per call, without a lock: a message may have megabytes.
        """
        reached = [self._roots.setdefault(kind, MessageNode())]
        is_edited = False
        for key, message in zip(keys, messages, strict=True):
            further = [child for node in reached for child in node.same(key, message)]
            if not further:
                is_edited = message["role"] == "assistant" and any(node.has_turns for node in reached)
                break
            reached = further  # all that say the same: only one of them may be the one that was continued
        node = _newest(reached)
        nodes = node.path
        found = Match(node, len(nodes), is_edited=is_edited)
        sampled = [n for n, one in enumerate(nodes) if one.turn is not None]
        last = nodes[sampled[-1]].turn if sampled else None
        if last is not None:
            path = last.path  # without turns from before a fork
            found.turns = [(n, turn) for n in sampled if (turn := nodes[n].turn) is not None and turn in path]
            found.num_healed = sum(not _is_same(nodes[n].message, messages[n]) for n, _ in found.turns)
        return found

    def add(
        self, match: Match, messages: Sequence[Message], keys: Sequence[str], *, reply: Message, turn: SampledTurn
    ) -> None:
        """Adds a turn after these messages, for which `match` was found when they came."""
        node = match.node
        for key, message in zip(keys[match.length :], messages[match.length :], strict=True):
            node = node.child(key, message)
        node.child(message_key(reply), reply, turn)
        self.turns.append(turn)

    def discard(self, turns: Collection[SampledTurn]) -> None:
        """No later call continues these turns, whatever its messages say."""
        for turn in turns:
            turn.is_discarded = True
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            for said, same in node.children.items():
                node.children[said] = [child for child in same if child.turn not in turns]
                nodes += node.children[said]


def _newest(nodes: Sequence[MessageNode]) -> MessageNode:
    """The latest of equal messages, if possible a turn that the agent has read."""
    kept = [node for node in nodes if node.turn is not None and node.turn.is_kept]
    return (kept or nodes)[-1]


def _is_same(recorded: Message, sent: Message) -> bool:
    """Whether a message of the assistant was sent back as it was given, ids of tool calls aside."""
    calls = [[call["function"] for call in one.get("tool_calls", ())] for one in (recorded, sent)]
    return recorded["content"] == sent["content"] and calls[0] == calls[1]

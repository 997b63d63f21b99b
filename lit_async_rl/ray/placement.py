"""Which replica samples a request: the one with the fewest outstanding tokens, or the one that knows the beginning."""

from __future__ import annotations

from collections import OrderedDict

NUM_SESSIONS = 65536  # remembered, the latest


class Placement:
    """Counts the outstanding tokens of each replica and chooses among those that are in. No thread, clock or actor.

    Requests of one session (parts of a group, turns of a conversation) go to the same replica, where their beginning is
    cached, until its load exceeds the least by so much that reading the beginning anew is quicker.

    Args:
        session_margin: how many times the tokens of a request its session's replica may have outstanding beyond
            those of the least loaded one.

    Attributes:
        load: outstanding tokens by replica.
    """

    def __init__(self, session_margin: float) -> None:
        self.session_margin = session_margin
        self.load: dict[int, int] = {}
        self._sessions: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.load)

    def add(self, replica: int, num_tokens: int = 0) -> None:
        """Lets requests go to a replica, which has so many tokens outstanding."""
        self.load[replica] = num_tokens

    def remove(self, replica: int) -> None:
        """Lets no more requests go to a replica; the caller places again what was there."""
        self.load.pop(replica, None)

    def place(self, session: int | None, num_tokens: int) -> int:
        """Chooses a replica for a request of at most `num_tokens`, and adds them to its load.

        Raises:
            ValueError: no replica is in.
        """
        least_load, replica = min((load, number) for number, load in self.load.items())
        if session is not None:
            known = self._sessions.pop(session, replica)
            excess = self.load.get(known, float("inf")) - least_load
            replica = known if excess <= self.session_margin * num_tokens else replica
            self._sessions[session] = replica
            if len(self._sessions) > NUM_SESSIONS:
                self._sessions.popitem(last=False)
        self.load[replica] += num_tokens
        return replica

    def finish(self, replica: int, num_tokens: int) -> None:
        """Takes tokens off a replica's load; ignored for one that is not in."""
        if replica in self.load:
            self.load[replica] -= num_tokens

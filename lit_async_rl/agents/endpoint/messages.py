"""Messages of the trainer to a process of agents: pickled, behind their length."""

from __future__ import annotations

from dataclasses import dataclass

from lit_async_rl.agents.api.openai_clients import EndpointAddress

HEADER_BYTES = 8  # the length of a message


@dataclass(frozen=True)
class Play:
    """An episode begins.

    Attributes:
        number: of the episode.
        prompt: pickled, to fail alone.
        address: of its endpoint.
    """

    number: int
    prompt: bytes
    address: EndpointAddress


@dataclass(frozen=True)
class Cancel:
    """An episode is to be cancelled."""

    number: int

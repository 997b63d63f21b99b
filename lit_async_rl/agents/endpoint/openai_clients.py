"""Clients of the official `openai` package that share connections. Imports nothing else, for processes of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING = 'agents that use an OpenAI client need Starlette, uvicorn and openai: pip install "lit-async-rl[agents]"'
CALL_TIMEOUT_S = 600.0  # as the official client
# Each call looks at every connection of its pool, twice: with hundreds of episodes in one pool that takes as long as
# all else.
NUM_POOLS = 32


@dataclass(frozen=True)
class EndpointAddress:
    """Where a client finds the policy, the key of its episode, and the time-out of its calls in seconds.

    Named as the attributes of an `openai.AsyncOpenAI`, in place of which it stands.
    """

    base_url: str
    api_key: str = field(repr=False)
    timeout: float = CALL_TIMEOUT_S


def address_of(client: Any) -> EndpointAddress:
    """The address of a client of the official package, for one in another process."""
    timeout = getattr(client, "timeout", None)
    return EndpointAddress(
        str(client.base_url),
        api_key=str(client.api_key),
        # of a client that a user has made it may be several limits, one for each part of a call
        timeout=float(timeout) if isinstance(timeout, int | float) else CALL_TIMEOUT_S,
    )


class OpenAIClients:
    """Makes clients of the official package, which share pools of connections. Used by one event loop."""

    def __init__(self) -> None:
        self._pools: list[Any] = []
        self._num_made = 0

    def make(self, address: EndpointAddress) -> Any:
        """An `openai.AsyncOpenAI`.

        Raises:
            ImportError: `openai` is not installed.
        """
        openai = import_openai()
        if len(self._pools) < NUM_POOLS:
            # without the environment's proxies, which do not lead to this machine, and without certificates to read:
            # the base URL is plain HTTP
            self._pools.append(openai.DefaultAsyncHttpxClient(trust_env=False, verify=False))
        pool = self._pools[self._num_made % len(self._pools)]
        self._num_made += 1
        return openai.AsyncOpenAI(
            base_url=address.base_url, api_key=address.api_key, http_client=pool, timeout=address.timeout
        )

    async def aclose(self) -> None:
        """Closes all connections; a later client has others."""
        pools = self._pools
        self._pools = []
        for pool in pools:
            await pool.aclose()


def import_openai() -> Any:
    """The package `openai`.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError(f"{MISSING} ({error})") from error
    return openai

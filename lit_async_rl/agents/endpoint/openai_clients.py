"""Clients of the official `openai` package that share connections. Imports nothing else, for processes of agents."""

from __future__ import annotations

from typing import Any

MISSING = 'agents that use an OpenAI client need Starlette, uvicorn and openai: pip install "lit-async-rl[agents]"'
CALL_TIMEOUT_S = 600.0  # as the official client
# Each call looks at every connection of its pool, twice: with hundreds of episodes in one pool that takes as long as
# all else.
NUM_POOLS = 32


class OpenAIClients:
    """Makes clients of the official package, which share pools of connections. Used by one event loop.

    Args:
        timeout_s: time-out of a call.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pools: list[Any] = []
        self._num_made = 0

    def make(self, base_url: str, api_key: str) -> Any:
        """An `openai.AsyncOpenAI`.

        Raises:
            ImportError: `openai` is not installed.
        """
        openai = import_openai()
        if len(self._pools) < NUM_POOLS:
            # without the environment's proxies, which do not lead to this machine, and without certificates to read:
            # the base URL is plain HTTP
            self._pools.append(openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=self.timeout_s))
        pool = self._pools[self._num_made % len(self._pools)]
        self._num_made += 1
        return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=pool, timeout=self.timeout_s)

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

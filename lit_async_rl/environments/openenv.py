"""Environments of OpenEnv servers (https://github.com/huggingface/OpenEnv), by the package `openenv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import check_address, key_of_variable

MISSING = 'environments of OpenEnv servers need the package openenv: pip install "lit-async-rl[openenv]"'
RESET = "openenv_reset"  # metadata of a prompt: arguments of the reset that it is the observation of


class OpenEnvServer:
    """A server with environments, one for each connection.

    Args:
        url: of the server.
        text_field: field of an observation with the text for the policy.
        api_key_env: environment variable with a key that the server wants as `Authorization: Bearer`.
        timeout_s: limit of a connection, and of each answer.

    Raises:
        ValueError: a setting is out of range, or the environment variable is not set.
    """

    def __init__(self, url: str, text_field: str, api_key_env: str | None, timeout_s: float) -> None:
        check_range("OpenEnvEnvironment", "positive", timeout_s=timeout_s)
        check_address("OpenEnvEnvironment.url", url, "OpenEnvEnvironment.api_key_env")
        self.url = url
        self.text_field = text_field
        self.api_key_env = api_key_env
        self.timeout_s = timeout_s
        key_of_variable("OpenEnvEnvironment.api_key_env", api_key_env)

    def client(self) -> Any:
        """Creates a client for a separate environment, not yet connected.

        Raises:
            ImportError: the package `openenv` is not installed.
            ValueError: the key's environment variable is no longer set.
        """
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        key = key_of_variable("OpenEnvEnvironment.api_key_env", self.api_key_env)
        return GenericEnvClient(
            base_url=self.url,
            connect_timeout_s=self.timeout_s,
            message_timeout_s=self.timeout_s,
            headers=None if not key else {"Authorization": f"Bearer {key}"},
        )

    def text(self, observation: Any) -> str:
        """Text of an observation.

        Raises:
            ValueError: it has no such field; names those that it has.
        """
        if not isinstance(observation, Mapping) or self.text_field not in observation:
            fields = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
            raise ValueError(f"text_field={self.text_field!r}: the observation of {self.url} has {fields}")
        return str(observation[self.text_field])


class OpenEnvEnvironment(Environment):
    """Environments of an OpenEnv server, a connection for each rollout.

    The prompt's text must be the first observation, as with `OpenEnvPrompts`: a reset that gives another one is an
    error. The server must allow as many sessions as there are concurrent rollouts (`max_concurrent_envs`).

    Args:
        url: see `OpenEnvServer`; likewise `text_field`, `api_key_env` and `timeout_s`.
        action_field: field of an action that gets the policy's text; override `action` for others.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        action_field: str = "message",
        text_field: str = "text",
        api_key_env: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.server = OpenEnvServer(url, text_field, api_key_env, timeout_s=timeout_s)
        self.url = url
        self.action_field = action_field
        self.text_field = text_field
        self.api_key_env = api_key_env
        self.timeout_s = timeout_s

    def action(self, completion: str) -> Mapping[str, Any]:
        """The action of a turn of the policy."""
        return {self.action_field: completion}

    async def start(self, prompt: Prompt) -> OpenEnvEpisode:
        """Connects and resets an environment.

        Raises:
            ImportError: the package `openenv` is not installed.
            ConnectionError: the server does not answer, or has no session left.
            ValueError: the prompt is not that of `OpenEnvPrompts`, or the reset gives another observation.
        """
        reset = prompt.metadata.get(RESET)
        if reset is None:
            raise ValueError("OpenEnvEnvironment needs data.prompts of class OpenEnvPrompts")
        client = self.server.client()
        try:
            await client.connect()
            text = self.server.text((await client.reset(**reset)).observation)
            if text != prompt.text:
                raise ValueError(
                    f"environment {self.url} is not repeatable: reset({reset}) first gave {prompt.text[:80]!r}, and "
                    f"now gave {text[:80]!r}"
                )
        except BaseException:  # also when it is cancelled
            await client.close()
            raise
        return OpenEnvEpisode(self, client)


class OpenEnvEpisode(Episode):
    """An episode of an OpenEnv server.

    Args:
        environment: its settings.
        client: connected, and reset.
    """

    def __init__(self, environment: OpenEnvEnvironment, client: Any) -> None:
        self._environment = environment
        self._client = client

    async def step(self, completion: str) -> Observation:
        """Sends a turn as an action."""
        result = await self._client.step(dict(self._environment.action(completion)))
        is_done = bool(result.done)
        return Observation(
            text="" if is_done else self._environment.server.text(result.observation),
            reward=float(result.reward or 0.0),
            done=is_done,
        )

    async def close(self) -> None:
        """Ends the connection, and with it the environment."""
        await self._client.close()


class OpenEnvPrompts(PromptSource):
    """First observations of an OpenEnv server as prompts: of seeds, or of the tasks of a split.

    Args:
        url: see `OpenEnvServer`; likewise `text_field`, `api_key_env` and `timeout_s`.
        size: number of prompts.
        first: seed of prompt 0, or index of its task; use disjoint ranges for training and validation.
        split: reset with `split` and `index`, as servers with OpenEnv's task API want it; None resets with `seed`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        size: int = 1000,
        first: int = 0,
        split: str | None = None,
        text_field: str = "text",
        api_key_env: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        check_range("OpenEnvPrompts", "integer >= 1", size=size)
        check_range("OpenEnvPrompts", "integer >= 0", first=first)
        self.server = OpenEnvServer(url, text_field, api_key_env, timeout_s=timeout_s)
        self.size = size
        self.first = first
        self.split = split

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        number = self.first + index
        reset: dict[str, Any] = {"seed": number} if self.split is None else {"split": self.split, "index": number}
        with self.server.client().sync() as client:
            result = client.reset(**reset)
        return Prompt(text=self.server.text(result.observation), metadata={RESET: reset})

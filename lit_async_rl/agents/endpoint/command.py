"""Agents that are programs in any language: processes with an OpenAI client."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.results import AgentResult, stated_result
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.commands import run_to_end
from lit_async_rl.runtime.process import end_reason
from lit_async_rl.utils.checks import check_choice
from lit_async_rl.utils.identity import file_contents

MAX_ERROR_CHARS = 2000
MAX_NAME_CHARS = 200
CONCEALED = "(the episode's key)"
RewardFrom = Literal["stdout", "exit_status"]


class CommandAgentError(RuntimeError):
    """An agent's process failed; the message has its exit status and the end of its stderr."""


class CommandAgent:
    """Runs a command as the agent of each episode.

    The process gets the environment of the run with

    | variable | value |
    |---|---|
    | `OPENAI_BASE_URL`, `OPENAI_API_KEY` | address of the endpoint, and the key of this episode |
    | `NO_PROXY`, `no_proxy` | with the endpoint's host, so that no proxy is asked |

    and on stdin one JSON object with the prompt's `text`, `messages` (null for a text), `answer` and `metadata`. Its
    reward is the last line that it writes to stdout: a number, or an object `{"reward": 0.5, "parts": {"tests": 0.5}}`.
    What it writes to stderr is not shown, unless it fails.

    A process that ends with an exit status other than 0, by a signal, or without a reward has failed, like an agent in
    Python that raises. After its episode its process group is killed, and on Linux every process that it has started,
    even if the trainer is killed.

    Example:
        ```yaml
        agent: {class_path: lit_async_rl.CommandAgent, init_args: {command: [python, my_agent.py]}}
        ```

    Args:
        command: program and arguments; no shell reads it.
        reward: `stdout` as above. `exit_status`: 1 for exit status 0, and 0 for exit status 1, as test runners have it;
            stdout is ignored then.
        environment: further environment variables.

    Attributes:
        clients: makes the endpoint, unless the engine has `clients`.

    Raises:
        ValueError: the command is empty or no list.
    """

    def __init__(
        self,
        command: Sequence[str],
        reward: RewardFrom = "stdout",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f"CommandAgent.command must be a list of the program and its arguments, got {command!r}")
        check_choice("CommandAgent", ("stdout", "exit_status"), reward=reward)
        self.command = list(command)
        self.reward = reward
        self.environment = dict(environment or {})
        self.clients = EndpointClients()

    def identified_by(self) -> dict[str, Any]:
        """Contents of the program's files, which affect rewards like arguments; see `reward_identity`."""
        return {"files": file_contents(self.command)}

    async def astart(self) -> None:
        """Ends the run before its first episode if there is no such program.

        Raises:
            EnvironmentFailure: names the program.
        """
        program = self.command[0]
        if shutil.which(program, path=(os.environ | self.environment).get("PATH")) is None:
            failure = EnvironmentFailure(f"CommandAgent.command={self.command}: there is no program {program!r}")
            failure.ends_run = True
            raise failure

    async def aclose(self) -> None:
        """Does nothing: each process ends with its episode."""

    async def __call__(self, prompt: Prompt, client: Any) -> AgentResult:
        """Runs the command for one episode, and returns its reward.

        Args:
            prompt: of the episode.
            client: of the episode, with its address and key.

        Raises:
            CommandAgentError: it failed, or wrote no reward.
            OSError: no process can be started.
        """
        api_key = str(client.api_key)
        variables = self._variables(str(client.base_url).rstrip("/"), api_key)
        finished = await run_to_end(self.command, _input_of(prompt), variables)
        if finished.status is None:
            raise CommandAgentError(f"the agent {' '.join(self.command)[:MAX_NAME_CHARS]!r} cannot be killed")
        lines = finished.output.rstrip().splitlines() or [""]
        return self._result(finished.status, lines[-1].strip(), finished.errors.replace(api_key, CONCEALED))

    def _variables(self, base_url: str, api_key: str) -> dict[str, str]:
        """Environment of the process."""
        host = urlsplit(base_url).hostname or ""
        variables = os.environ | self.environment
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(part for part in (variables.get(name), host) if part)
        return variables | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}

    def _result(self, status: int, line: str, errors: str) -> AgentResult:
        """Reward of a process that has ended.

        Raises:
            CommandAgentError: it failed, or wrote no reward.
        """
        name = " ".join(self.command)[:MAX_NAME_CHARS]
        end = f"; it wrote: {errors.strip()[-MAX_ERROR_CHARS:]}" if errors.strip() else ""
        if status < 0:
            raise CommandAgentError(f"the agent {name!r} was ended by {end_reason(status)}{end}")
        if self.reward == "exit_status" and status in (0, 1):
            return AgentResult(reward=float(status == 0))
        if status:
            raise CommandAgentError(f"the agent {name!r} ended with exit {end_reason(status)}{end}")
        try:
            result = stated_result(json.loads(line))
        except (ValueError, RecursionError):
            result = None
        if result is None:
            raise CommandAgentError(
                f"the agent {name!r} must write its reward as the last line of stdout, as a number or an object like "
                f'{{"reward": 0.5}}, got {line[:MAX_NAME_CHARS]!r}{end}'
            )
        return result


def _input_of(prompt: Prompt) -> bytes:
    """Stdin of the process."""
    text = None if prompt.messages is not None else prompt.text
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    sent = {"text": text, "messages": messages, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
    return json.dumps(sent, default=str).encode() + b"\n"

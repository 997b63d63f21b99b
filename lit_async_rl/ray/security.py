"""Who may reach Ray: its processes exchange pickles, so whoever reaches its ports runs code.

On loopback that is every user of this machine who can read the token; anywhere else token authentication is required.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any

from lit_async_rl.errors import SetupError

ANSWER_S = 60.0
AUTH_MODE = "RAY_AUTH_MODE"
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; with 0 its processes bind to loopback, on any system


def is_loopback(address: str) -> bool:
    """Whether an address, `HOST` or `HOST:PORT`, is of loopback."""
    has_port = address.count(":") == 1 or (address.startswith("[") and not address.endswith("]"))
    host = address.rpartition(":")[0] if has_port else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def use_token() -> None:
    """Has a Ray that this process starts ask for a token, and this process send it, to a running cluster, too.

    Ray does the first by itself, with a warning each time, and the second not at all.
    """
    if "ray" not in sys.modules:  # else it has read the variable already
        os.environ.setdefault(AUTH_MODE, "token")


def has_token() -> bool:
    """Whether there is a token of Ray's in the environment, or in the file where Ray looks for one."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


def check_access(ray: Any) -> None:
    """Refuses a cluster that other machines reach without a token. Asks its nodes: this process may differ from them.

    Args:
        ray: the module, connected.

    Raises:
        SetupError: a node is not on loopback and asks for no token; says what to do.
    """
    reachable = [node for node in ray.nodes() if node["Alive"] and not is_loopback(node["NodeManagerAddress"])]
    if not reachable:
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(auth_mode)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in reachable]
    try:
        modes = ray.get([ask.options(scheduling_strategy=place).remote() for place in places], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise SetupError(f"cluster: not every node has said whether it asks for a token: {error}") from error
    for node, mode in zip(reachable, modes, strict=True):
        if mode != "token":
            raise SetupError(refusal(node["NodeManagerAddress"], mode))


def auth_mode() -> str | None:
    """`RAY_AUTH_MODE` of the Ray that this process belongs to."""
    return os.environ.get(AUTH_MODE)


def refusal(host: str, mode: str | None) -> str:
    """Message about a node that asks for no token."""
    return (
        f"cluster: the node {host} is not on loopback, and its Ray asks for no token ({AUTH_MODE}={mode}): whoever "
        f"reaches its ports runs code there. Set {AUTH_MODE}=token and the same token (`ray get-auth-token "
        "--generate`, or RAY_AUTH_TOKEN) on every node before `ray start`; docs/ray.md"
    )

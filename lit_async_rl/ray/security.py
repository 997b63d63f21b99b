"""Who may reach Ray: its processes exchange pickles, so whoever reaches its ports runs code.

On loopback that is every user of this machine who can read the token; anywhere else token authentication is required.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable

from lit_async_rl.errors import SetupError

AUTH_MODE = "RAY_AUTH_MODE"
ALL_INTERFACES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; without clusters it binds to loopback alone


def is_loopback(address: str) -> bool:
    """Whether an address, `HOST` or `HOST:PORT`, is of loopback."""
    host = address.rpartition(":")[0] if address.count(":") == 1 else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind_to_loopback() -> None:
    """Lets the Ray that this process starts bind its ports to loopback; call it before `ray.init`.

    Given 127.0.0.1 as its address, Ray resolves it to one that other machines reach, and listens on all interfaces. The
    variable is its switch for machines whose firewalls ask; processes that Ray starts inherit it.
    """
    os.environ[ALL_INTERFACES] = "0"
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # where ray was imported before


def check_access(hosts: Iterable[str], auth_mode: str | None) -> None:
    """Refuses a cluster that other machines reach without a token.

    Args:
        hosts: addresses of its nodes.
        auth_mode: `RAY_AUTH_MODE` of its processes, not of this one.

    Raises:
        SetupError: says what to do.
    """
    reachable = sorted(host for host in hosts if not is_loopback(host))
    if reachable and auth_mode != "token":
        raise SetupError(
            f"cluster: the node {reachable[0]} is not on loopback, and its Ray asks for no token ({AUTH_MODE}="
            f"{auth_mode}): whoever reaches its ports runs code there. Set {AUTH_MODE}=token and the same token "
            "(`ray get-auth-token --generate`, or RAY_AUTH_TOKEN) on every node before `ray start`; docs/ray.md"
        )

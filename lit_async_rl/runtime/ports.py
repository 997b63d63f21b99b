"""Network ports: free ones, listening sockets, and whether somebody listens."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
# of accepted connections, whose client's machine may vanish without a word: closed after two minutes of silence
KEEP_ALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
)


def free_port(host: str = LOOPBACK) -> int:
    """A free port of `host`, an address of this machine; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listening(host: str, port: int) -> socket.socket:
    """Socket that listens on an IPv4 or IPv6 address, and drops connections whose client has vanished.

    Raises:
        OSError: the address cannot be used.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                found.setsockopt(level, getattr(socket, name), value)
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError:
        found.close()
        raise
    return found


def reach(host: str, port: int, timeout_s: float) -> None:
    """Connects to a port, and hangs up.

    Raises:
        OSError: nobody accepts a connection within `timeout_s`; resolving the name has no limit.
    """
    socket.create_connection((host, port), timeout=timeout_s).close()

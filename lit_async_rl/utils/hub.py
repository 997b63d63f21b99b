"""The Hugging Face hub: whether it can be reached, found out before its libraries try for half a minute."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import threading
from urllib.parse import urlparse

from huggingface_hub import constants

log = logging.getLogger(__name__)
CONNECT_S = 3.0  # until the hub counts as not reachable; its libraries try five times, in about 25 s
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


@functools.cache
def go_offline_if_unreachable() -> None:
    """Switches the libraries of the hub to what is cached here, for this process, if the hub does not answer.

    Does nothing where they are offline already, and where a proxy is set, which resolves names itself.
    """
    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in PROXIES):
        return
    endpoint = urlparse(constants.ENDPOINT)
    host = endpoint.hostname or "huggingface.co"
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    if (problem := _problem(host, port)) is None:
        return
    log.info("%s cannot be reached (%s): models and data come from the cache, as with HF_HUB_OFFLINE=1", host, problem)
    constants.HF_HUB_OFFLINE = True
    if (datasets_config := sys.modules.get("datasets.config")) is not None:  # it copied the value when it was imported
        datasets_config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _problem(host: str, port: int) -> str | None:
    """Why no connection can be made in time; None if one can."""
    outcome = [f"no answer in {CONNECT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as error:
            outcome[0] = str(error)
        else:
            outcome.clear()

    # in a thread of its own: resolving a name has no time limit
    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return outcome[0] if outcome else None

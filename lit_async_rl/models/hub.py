"""Offline mode of the Hugging Face libraries if the hub cannot be reached; their own retries take half a minute."""

from __future__ import annotations

import functools
import logging
import os
import sys
from urllib.parse import urlparse

from huggingface_hub import constants

from lit_async_rl.runtime.ports import reach
from lit_async_rl.runtime.threads import start_thread

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


@functools.cache
def go_offline_if_unreachable() -> None:
    """Limits this process to cached models and data if the hub does not answer within `CONNECT_TIMEOUT_S`.

    Does nothing if the libraries are offline already, or if a proxy is set: it resolves names itself, so a direct
    connection says nothing about it.
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
    if (datasets_config := sys.modules.get("datasets.config")) is not None:  # copied the value at import
        datasets_config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _problem(host: str, port: int) -> str | None:
    """The reason why no connection can be made in time; None if it can."""
    outcome = [f"no answer in {CONNECT_TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            reach(host, port, CONNECT_TIMEOUT_S)
        except OSError as error:
            outcome[0] = str(error)
        else:
            outcome.clear()

    # in a separate thread: resolving a name has no time limit
    start_thread(connect, name="hub").join(CONNECT_TIMEOUT_S)
    return outcome[0] if outcome else None

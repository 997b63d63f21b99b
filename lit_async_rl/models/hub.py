"""Offline mode of the Hugging Face libraries if the hub is out of reach; their own retries take half a minute."""

from __future__ import annotations

import functools
import logging
import os
import sys
from urllib.parse import urlparse

from huggingface_hub import constants

from lit_async_rl.runtime.guarded_calls import call
from lit_async_rl.runtime.ports import reach
from lit_async_rl.runtime.waiting import Wait

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


@functools.cache
def go_offline_if_unreachable() -> None:
    """Limits this process to cached models and data if the hub does not answer within `CONNECT_TIMEOUT_S`.

    Does nothing if the libraries are offline already, or if a proxy is set, which resolves names itself: a direct
    connection says nothing about it.
    """
    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in PROXIES):
        return
    endpoint = urlparse(constants.ENDPOINT)
    host = endpoint.hostname or "huggingface.co"
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    wait = Wait(CONNECT_TIMEOUT_S, f"no answer in {CONNECT_TIMEOUT_S:g} s")
    try:
        call(lambda: reach(host, port, CONNECT_TIMEOUT_S), wait)  # resolving a name has no time limit of its own
        return
    except (OSError, UnicodeError) as problem:  # the latter of a host name such as `hub..org`
        cached = "models and data come from the cache, as with HF_HUB_OFFLINE=1"
        log.info("%s cannot be reached (%s): %s", host, problem, cached)
    constants.HF_HUB_OFFLINE = True
    if (datasets_config := sys.modules.get("datasets.config")) is not None:  # copied the value at import
        datasets_config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]

"""Small vLLM engines in the test process, and the processes that they start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
from replays import collect

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.vllm.engine import VLLMEngine

SMALL = dict(kv_cache_memory_gb=0.06, max_num_seqs=64, startup_timeout_s=200.0, update_timeout_s=60.0)


def started(model: str, **settings: Any) -> VLLMEngine:
    engine = VLLMEngine(**(SMALL | settings))
    engine.setup(model)
    return engine


def children() -> set:
    """Its processes."""
    found = psutil.Process().children(recursive=True)
    return {p for p in found if "VLLM" in p.name() and p.status() != psutil.STATUS_ZOMBIE}


def sampled_over_updates(
    engine: VLLMEngine, lms: dict[int, Any], requests: Sequence[GenerationRequest], versions: Iterable[int]
) -> list[Completion]:
    """Completions of requests while which weights change, each time after 150 more tokens.

    Raises AssertionError if they end before: they have to be long enough for a busy machine that stops the caller.
    """
    engine.submit(requests)
    for version in versions:
        seen = engine.num_tokens
        while engine.num_tokens < seen + 150:
            assert engine.num_running, f"all ended before version {version}, after {engine.num_tokens} tokens"
            time.sleep(0.001)
        engine.load_weights(version, lms[version].named_parameters())
    return collect(engine, sum(request.num_samples for request in requests))

"""Small vLLM engines in the test process, and the processes that they start."""

from __future__ import annotations

from typing import Any

import psutil

from lit_async_rl.engines.vllm.engine import VLLMEngine

SMALL = dict(kv_cache_memory_gb=0.06, max_num_seqs=64, startup_timeout_s=200.0, update_timeout_s=60.0)


def started(model: str, **settings: Any) -> VLLMEngine:
    engine = VLLMEngine(**(SMALL | settings))
    engine.setup(model)
    return engine


def children() -> set:
    """Its processes."""
    found = psutil.Process().children(recursive=True)
    return {p for p in found if "VLLM" in p.name() and p.status() != psutil.STATUS_ZOMBIE}

"""vLLM's scheduler, changed so that after an update no prompt is read from the KV cache of older weights.

Loaded by name: `scheduler_cls="lit_async_rl.vllm.scheduler.make_scheduler"` in the engine's arguments.

The samples of a prompt share its KV cache, and samples that wait for memory may start after an update. vLLM finds
cached blocks by a hash of the tokens and of the request's salt; it does not know that the weights changed. Here the
salt also counts the pauses, during which weights are loaded: samples that start after an update share the cache of
their prompt with each other, and never with samples that started before it.
"""

from __future__ import annotations

import time
from typing import Any

SCHEDULER = "lit_async_rl.vllm.scheduler.make_scheduler"
SEPARATOR = "\n"  # between a request's own salt and the number of pauses


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler of an engine, derived from vLLM's default class for its configuration."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("FreshPromptScheduler", (FreshPrompts, base), {})(vllm_config=vllm_config, **arguments)


class FreshPrompts:
    """Mixin for `vllm.v1.core.sched.scheduler.Scheduler`, which has the attributes used here."""

    requests: dict[str, Any]
    running: list[Any]
    prev_step_scheduled_req_ids: set[str]
    _num_pauses = 0

    def add_request(self, request: Any) -> None:
        """Queues a request with the present salt, also if it was sent before an update and arrives after it."""
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any) -> None:
        """Pauses or resumes; in between, new weights may have been loaded."""
        super().set_pause_state(pause_state)  # type: ignore[misc]
        if pause_state.name != "UNPAUSED":
            return
        self._num_pauses += 1
        unfinished = [request for request in self.running if request.num_output_tokens == 0]
        for request in reversed(unfinished):  # parts of their prompts were read with the older weights
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        for request in self.requests.values():
            if request.num_computed_tokens == 0:
                self._salt(request)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Frees a request's memory; its tokens will be recomputed with the newest weights only."""
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._salt(request)

    def _salt(self, request: Any) -> None:
        own = (request.cache_salt or "").partition(SEPARATOR)[0]
        request.cache_salt = f"{own}{SEPARATOR}{self._num_pauses}"
        request.block_hashes = []
        request.update_block_hashes()

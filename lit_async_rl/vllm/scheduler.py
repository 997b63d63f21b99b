"""vLLM's scheduler, changed to read no prompt from the KV cache of older weights after an update.

Loaded by name: `scheduler_cls="lit_async_rl.vllm.scheduler.make_scheduler"` in the engine's arguments.

The samples of a prompt share its KV cache, and those that wait for memory may start after an update. vLLM finds cached
blocks by a hash of tokens and the request's salt, whatever the weights. Here the salt also counts the pauses, in which
weights are loaded: samples that start after an update share their prompt's cache with each other, and never with
earlier ones.
"""

from __future__ import annotations

import time
from typing import Any

SCHEDULER = "lit_async_rl.vllm.scheduler.make_scheduler"
SEPARATOR = "\n"  # between a request's own salt and the number of pauses


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler of an engine, derived from vLLM's default for its configuration."""
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
        """Queues a request with the present salt, even if it was sent before an update."""
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
        """Frees a request's memory; its tokens are recomputed with the newest weights only."""
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._salt(request)

    def _salt(self, request: Any) -> None:
        own = (request.cache_salt or "").partition(SEPARATOR)[0]
        request.cache_salt = f"{own}{SEPARATOR}{self._num_pauses}"
        request.block_hashes = []
        request.update_block_hashes()

"""Blocking generation without a producer: validation, benchmarks, tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.request_ledger import RequestLedger
from lit_async_rl.errors import StalledError

POLL_S = 1.0


def run_requests(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    vocab_size: int | None = None,
    timeout_s: float = 600.0,
    on_progress: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """All completions of each request, by sample index; blocks until they are finished.

    A request that the engine gave up has none.

    Args:
        engine: loaded with weights and polled only here.
        requests: with different ids.
        vocab_size: of the model, to check completions against.
        timeout_s: longest time without a token or a completion, except while an environment works within its limits.
        on_progress: called about once a second, as long as tokens come.

    Raises:
        CompletionError: the engine returned something that cannot be right.
        StalledError: nothing came for `timeout_s`.
    """
    found: dict[int, list[Completion]] = {request.id: [] for request in requests}
    missing = sum(request.num_samples for request in requests)
    ledger = RequestLedger(engine, vocab_size)
    ledger.open(requests)
    engine.submit(requests)
    last_change, num_tokens = time.monotonic(), engine.num_tokens
    while missing:
        for completion in ledger.listed(engine.poll(min(POLL_S, timeout_s)), "poll"):
            if ledger.receive(completion):
                found[completion.request_id].append(completion)
                missing -= 1
                last_change = time.monotonic()
        for request_id in engine.take_given_up():
            lacking = ledger.num_missing(request_id)
            ledger.abort([request_id])
            found[request_id] = []
            missing -= lacking
            last_change = time.monotonic()
        work = engine.outside_work()
        if work is not None and work.is_within_limits:
            last_change = time.monotonic()
            on_progress()
        if num_tokens != (num_tokens := engine.num_tokens):
            last_change = time.monotonic()
            on_progress()
        if missing and time.monotonic() - last_change > timeout_s:
            raise StalledError(
                f"{type(engine).__name__} gave no token for {timeout_s:g} s; {missing} samples lack"
                + (f": {work}, which never returns" if work is not None else "")
            )
    return [sorted(found[request.id], key=lambda c: c.sample_index) for request in requests]

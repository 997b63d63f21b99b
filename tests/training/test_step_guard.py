"""Progress in a checkpoint, in whole optimizer steps."""

import pytest

from lit_async_rl.training.whole_steps import count_whole_steps


def saved(ready: int, processed: int, completed: int) -> dict:
    counts = dict(ready=ready, started=ready, processed=processed, completed=completed)
    progress = {"current": dict(counts), "total": dict(counts), "is_last_batch": False}
    return {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}


def counts_of(checkpoint: dict) -> list[dict[str, int]]:
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    return [progress["current"], progress["total"]]


@pytest.mark.parametrize("in_future", [None, 1, 4])
def test_the_end_of_a_step_stays_the_end_of_a_step(in_future):
    """Callbacks save before the last micro-batch is `completed`; by this Lightning knows, and does not repeat it."""
    checkpoint = saved(ready=6, processed=6, completed=5)
    count_whole_steps(checkpoint, 3, in_future)
    whole = 2 * (in_future or 3)
    for counts in counts_of(checkpoint):
        assert counts == dict(ready=whole, started=whole, processed=whole, completed=whole - 1)


@pytest.mark.parametrize(("processed", "completed"), [(4, 3), (4, 4), (3, 3)])
def test_within_a_step_it_begins_again_and_nothing_is_under_way(processed, completed):
    checkpoint = saved(ready=5 if processed == 4 else 4, processed=processed, completed=completed)
    count_whole_steps(checkpoint, 3)
    for counts in counts_of(checkpoint):
        assert set(counts.values()) == {3}

"""Which replica a request goes to: the least loaded one, and for a session the one that has its beginning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ray.placement import cost
from lit_async_rl.ray.placement import NUM_SESSIONS, Placement


def placed(num_replicas, session_margin=4.0):
    placement = Placement(session_margin)
    for number in range(num_replicas):
        placement.add(number)
    return placement


def test_requests_go_where_the_fewest_tokens_are_outstanding():
    placement = placed(3)
    sizes = [100, 10, 10, 10, 30, 90]
    assert [placement.place(None, size) for size in sizes] == [0, 1, 2, 1, 2, 1]
    placement.finish(0, 100)
    assert placement.place(None, 1) == 0


def test_a_session_stays_where_its_beginning_is_until_another_replica_idles_for_long():
    placement = placed(2, session_margin=3.0)
    assert [placement.place(7, 10) for _ in range(4)] == [0, 0, 0, 0]  # an excess of 30 tokens is the margin
    assert placement.place(7, 10) == 1
    assert placement.place(7, 10) == 1  # where its beginning is now, also
    placement.remove(1)
    assert placement.place(7, 10) == 0


def test_a_few_long_conversations_do_not_pin_one_replica_while_others_idle():
    placement = placed(4)
    for turn in range(200):
        for session in range(3):
            placement.place(session, 100)
        if turn % 2:
            for number, load in list(placement.load.items()):
                placement.finish(number, min(load, 150))
    assert min(placement.load.values()) > 0
    assert max(placement.load.values()) - min(placement.load.values()) <= 5 * 100


def test_without_a_replica_there_is_no_place():
    placement = placed(1)
    placement.remove(0)
    assert len(placement) == 0
    with pytest.raises(ValueError, match="empty"):
        placement.place(None, 1)


def test_the_memory_of_sessions_is_bounded():
    placement = placed(2)
    for session in range(NUM_SESSIONS + 10):
        placement.finish(placement.place(session, 5), 5)
    assert len(placement._sessions) == NUM_SESSIONS


@given(st.lists(st.tuples(st.sampled_from(["place", "finish", "remove", "add"]), st.integers(0, 4)), max_size=60))
def test_the_least_loaded_replica_is_found_whatever_came_before(events):
    placement = placed(5)
    for event, number in events:
        if event == "place" and len(placement):
            least = min(placement.load.values())
            before = dict(placement.load)
            chosen = placement.place(None, number + 1)
            assert before[chosen] == least
        elif event == "finish" and placement.load.get(number, 0) > 0:
            placement.finish(number, 1)
        elif event == "remove":
            placement.remove(number)
        elif event == "add" and number not in placement.load:
            placement.add(number)


@pytest.mark.parametrize("num_replicas", [1, 30])
def test_in_virtual_time_every_group_is_trained_on_once_within_its_bound(num_replicas):
    total, placing, staleness = cost(300, num_replicas, group_size=2, max_staleness=3)
    assert 0 < placing < total
    assert staleness <= 3

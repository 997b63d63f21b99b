"""Which server gets what: nothing lost, nothing twice, nobody overloaded. No network."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.vllm.servers.pool import Assignment, ServerPool

SERVERS = ["a", "b", "c"]


def request(number, prompt=3, samples=2, max_tokens=5, session=None) -> GenerationRequest:
    sampling, ids = SamplingParams(max_tokens=max_tokens), tuple(range(prompt))
    return GenerationRequest(id=number, prompt_ids=ids, num_samples=samples, sampling=sampling, session=session)


class AnythingMayHappen(RuleBasedStateMachine):
    """Servers come, go and answer late, in any order; old answers arrive, too."""

    def __init__(self):
        super().__init__()
        self.pool = ServerPool(SERVERS)
        self.submitted: list[int] = []
        self.aborted: set[int] = set()
        self.accepted: Counter[int] = Counter()
        self.ever_sent: list[Assignment] = []
        self.held = False

    @rule(data=st.data())
    def submit(self, data):
        sizes, sessions = st.integers(1, 50), st.none() | st.integers(0, 3)
        first = len(self.submitted)
        new = [request(first + n, max_tokens=data.draw(sizes), session=data.draw(sessions)) for n in range(3)]
        self.submitted += [r.id for r in new]
        self.pool.submit(new)

    @rule()
    def dispatch(self):
        for assignment in self.pool.dispatch():
            assert assignment.server in self.pool.servers_in
            assert not self.accepted[assignment.request.id]
            assert assignment.request.id not in self.aborted
            self.ever_sent.append(assignment)

    @rule(server=st.sampled_from(SERVERS))
    def bring_in(self, server):
        self.pool.bring_in(server)

    @rule(server=st.sampled_from(SERVERS))
    def take_out(self, server):
        for assignment in self.pool.take_out(server):
            assert assignment.server == server
        assert self.pool.outstanding(server) == 0

    @precondition(lambda self: self.ever_sent)
    @rule(data=st.data())
    def answer(self, data):
        assignment = data.draw(st.sampled_from(self.ever_sent))
        self.accepted[assignment.request.id] += self.pool.accept(assignment)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data):
        gone = set(data.draw(st.lists(st.sampled_from(self.submitted), max_size=2)))
        self.pool.abort(gone)
        self.aborted |= gone

    @rule()
    def hold(self):
        self.pool.hold()

    @rule()
    def release(self):
        self.pool.release()

    @invariant()
    def tokens_are_counted(self):
        current = [a for a in self.ever_sent if self.pool.is_current(a)]
        for server in SERVERS:
            assert self.pool.outstanding(server) == sum(a.num_tokens for a in current if a.server == server)
        assert len({a.request.id for a in current}) == len(current)
        assert all(a.server in self.pool.servers_in for a in current)

    def teardown(self):
        """Whatever happened: as soon as a server stays, each request is answered exactly once."""
        self.pool.release()
        self.pool.bring_in("b")
        self.dispatch()
        for assignment in self.ever_sent:
            self.accepted[assignment.request.id] += self.pool.accept(assignment)
        assert self.pool.is_idle
        for number in self.submitted:
            assert self.accepted[number] == 1 or (self.accepted[number] == 0 and number in self.aborted)


TestAnythingMayHappen = AnythingMayHappen.TestCase
TestAnythingMayHappen.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_no_server_has_more_to_do_than_another_by_more_than_the_largest_request(sizes):
    pool = ServerPool(SERVERS)
    for server in SERVERS:
        pool.bring_in(server)
    pool.submit([request(n, max_tokens=size) for n, size in enumerate(sizes)])
    largest = max(assignment.num_tokens for assignment in pool.dispatch())
    loads = [pool.outstanding(server) for server in SERVERS]
    assert max(loads) - min(loads) <= largest


def test_what_a_lost_server_had_comes_before_what_waits_and_in_the_old_order():
    pool = ServerPool(["a", "b"])
    pool.bring_in("a")
    pool.submit([request(0), request(1)])
    pool.dispatch()
    pool.take_out("a")
    pool.submit([request(2)])
    assert pool.dispatch() == []
    pool.bring_in("b")
    assert [assignment.request.id for assignment in pool.dispatch()] == [0, 1, 2]


def test_held_requests_wait_while_lost_ones_are_sent_again():
    pool = ServerPool(["a", "b"])
    pool.bring_in("a")
    pool.submit([request(0)])
    pool.dispatch()
    pool.hold()
    pool.submit([request(1)])
    pool.take_out("a")
    pool.bring_in("b")
    (again,) = pool.dispatch()
    assert again.request.id == 0
    assert not pool.is_idle
    assert pool.accept(again)
    assert pool.is_idle
    pool.release()
    assert [assignment.request.id for assignment in pool.dispatch()] == [1]


def full_pool() -> ServerPool:
    pool = ServerPool(SERVERS)
    for server in SERVERS:
        pool.bring_in(server)
    return pool


def send(pool: ServerPool, *requests: GenerationRequest) -> list[Assignment]:
    pool.submit(requests)
    return pool.dispatch()


def test_turns_of_an_episode_and_parts_of_a_group_go_where_they_began():
    pool = full_pool()
    homes = {a.request.session: a.server for a in send(pool, *(request(n, session=n) for n in range(6)))}
    assert Counter(homes.values()) == dict.fromkeys(SERVERS, 2)
    for turn in range(1, 5):
        following = [request(10 * turn + n, prompt=3 + turn, samples=1, session=n) for n in (4, 0, 5, 2, 1, 3)]
        assert {a.request.session: a.server for a in send(pool, *following)} == homes


def test_a_session_leaves_a_server_that_has_too_much_to_do_and_stays_where_it_went():
    pool = full_pool()
    (first,) = send(pool, request(0, session=7))
    pool.accept(first)
    send(pool, request(1, max_tokens=500))  # to the same server, which is the first of the idle ones
    assert pool.outstanding(first.server) > 1000
    (second,) = send(pool, request(2, session=7))
    assert second.server != first.server
    (third,) = send(pool, request(3, session=7))
    assert third.server == second.server


def test_a_session_goes_elsewhere_when_its_server_is_out_or_leaves_or_has_new_weights():
    pool = full_pool()
    (first,) = send(pool, request(0, session=7))
    pool.take_out(first.server)
    (again,) = pool.dispatch()
    assert again.server != first.server
    pool.leave(again.server)
    pool.bring_in(first.server)
    (second,) = send(pool, request(1, session=7))
    assert second.server == first.server, "not to the idlest"
    pool.stay(again.server)
    pool.forget_caches()
    assert send(pool, request(2, session=7))[0].server not in (first.server, again.server), "not to the idlest"


def test_sessions_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr("lit_async_rl.engines.vllm.servers.pool.NUM_REMEMBERED", 3)
    pool = full_pool()
    for n in range(20):
        for assignment in send(pool, request(n, session=n)):
            pool.accept(assignment)
    assert len(pool._homes) == 3

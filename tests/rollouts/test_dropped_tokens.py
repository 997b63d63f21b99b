"""Each sampled token is trained on, dropped by something that is named, or still under way."""

import math
from typing import ClassVar

import pytest
from flow import fit, make_data, make_module
from groups import group, simulated

from lit_async_rl import Bounded, Drop, Retry, Ring
from lit_async_rl.callbacks import RunSummary
from lit_async_rl.callbacks.monitors.dropped_work import dropped_row, dropped_sentence, in_words
from lit_async_rl.rollouts.intake import FAILED, DynamicSampling, Intake, OverlongFilter
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import LogNormal


def stats(dropped, trained, **more):
    return ProducerStats(dropped_tokens=dropped, trained_tokens=trained, **more)


@pytest.mark.parametrize(
    ("policy", "filters", "cause"),
    [
        (Bounded(), [DynamicSampling()], "DynamicSampling"),
        (Bounded(redundant_groups=3), [], "redundant_groups"),
        (Drop(ahead=4.0), [], "max_staleness"),
        (Retry(ahead=4.0), [], "max_staleness"),
        (Ring(num_sampling=12, capacity=2), [], "the ring buffer"),
    ],
)
def test_every_token_is_accounted_for(policy, filters, cause):
    rewards = iter(int(n % 6 == 1) for n in range(10**6))
    _, producer = simulated(Intake(filters), 1, lambda p, c: float(next(rewards)), 12, policy=policy)
    found = producer.stats()
    assert found.trained_tokens > 0
    assert found.dropped_tokens.keys() == {cause}
    waiting = sum(producer.book.num_tokens(one, ()) for one in producer.book.groups.values())
    accounted = found.trained_tokens + sum(found.dropped_tokens.values()) + waiting
    # this engine counts samples that it has returned, some of them after the producer stopped; of those that were
    # aborted it had sampled a part
    assert accounted == pytest.approx(found.num_tokens + producer.listener.num_aborted, rel=0.2)


def test_masked_tokens_count_as_dropped_by_the_filter_that_masks_them():
    intake = Intake([OverlongFilter()])
    kept = intake.filter_group(group([1.0, 0.0, 1.0], [5, 6, 7], reasons=["stop", "length", "stop"]), 0)
    assert intake.dropped_tokens == {"OverlongFilter": 6}
    intake.trained(kept, 0, 0)
    assert intake.trained_tokens == 12


@pytest.mark.slow
def test_a_reward_that_fails_costs_its_groups():
    calls = iter(range(10**6))

    def reward(prompt, completion):
        if next(calls) % 7 == 3:
            raise RuntimeError("no answer")
        return 1.0

    data = make_data(reward=reward, reward_tries=1)
    fit(make_module(), data, 4)
    assert data.stats().dropped_tokens.keys() == {FAILED}


@pytest.mark.slow
def test_an_engine_that_breaks_costs_what_it_had_begun():
    class Breaks(SimulatedEngine):
        """Breaks once, with samples half done."""

        polls: ClassVar = []

        def poll(self, timeout_s):
            found = super().poll(timeout_s)
            self.polls.append(self.num_tokens)
            if len(self.polls) == 6:
                raise RuntimeError("broke")
            return found

    data = make_data(engine=Breaks(LogNormal(0.05, 0.5), num_slots=8, tokens_per_s=200.0))
    fit(make_module(), data, 4)
    assert data.stats().dropped_tokens.get("engine restarts", 0) > 0


def test_the_words_say_how_much_by_what_and_what_to_do():
    easy = stats({"DynamicSampling": 83_000}, 17_000, num_sampled=100, sampled_reward=95.0)
    assert dropped_sentence(easy) == (
        "5 of 6 sampled tokens were dropped by DynamicSampling: harder prompts, a curriculum, or stop here"
    )
    hard = stats({"DynamicSampling": 83_000}, 17_000, num_sampled=100, sampled_reward=5.0)
    assert dropped_sentence(hard).endswith("easier prompts, a curriculum, or a larger data.group_size")
    late = stats({"max_staleness": 50, "MyFilter": 10}, 40)
    assert dropped_sentence(late).startswith("1 of 2 sampled tokens were dropped by max_staleness: a larger")
    assert dropped_row(late) == "60%: max_staleness 50%, MyFilter 10%"
    assert dropped_row(easy) == "DynamicSampling 83%"
    assert dropped_sentence(late, before=stats({"max_staleness": 50}, 0)) is None  # since then nothing much
    assert dropped_sentence(stats({}, 10)) is None
    assert dropped_row(stats({}, 0)) is None
    assert dropped_row(stats({"MyFilter": 1}, 10**6)) is None
    assert [in_words(share) for share in (1.0, 0.99, 0.5, 0.34)] == ["all", "99% of all", "1 of 2", "1 of 3"]
    assert math.isclose(sum(late.dropped_share().values()), 0.6)


def test_the_summary_has_a_row_for_what_was_dropped():
    rewards = iter(int(n % 8 == 1) for n in range(10**6))
    summary = RunSummary()
    data = make_data(reward=lambda p, c: float(next(rewards)), filters=[DynamicSampling()])
    trainer = fit(make_module(), data, 3, [summary])
    table = summary.table(trainer)
    found = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert found["sampled tokens dropped"].startswith("DynamicSampling ")
    assert found["checkpoint"] == "none was saved"

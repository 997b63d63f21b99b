"""A hundred thousand samples or prompts: admission takes time in proportion, and ends when the run is asked to stop."""

from flow import MODEL
from groups import simulated

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.group_book import GroupState, SampleRequests
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import Bounded
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.tasks import SortDigits


class Noted(int):
    """Counts how often such numbers are compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        type(self).num_compared += 1
        return int(self) == int(other)


def test_the_requests_of_a_large_group_are_made_without_comparing_all_samples_with_all():
    """A group of 20,000 took 1.5 s, and one of 100,000 took 37 s, in silence."""
    size = 2000
    for replicate in (False, True):
        Noted.num_compared = 0
        requests = SampleRequests(size, SamplingParams(), replicate_prompts=replicate)
        made = requests.make(0, Prompt(text=""), (1, 2), [Noted(n) for n in range(size)], [])
        assert sum(request.num_samples for request in made) == size
        assert Noted.num_compared <= 4 * size


def test_a_run_that_is_asked_to_stop_admits_no_more_prompts():
    engine = SimulatedEngine(Constant(0.01), num_slots=4, tokens_per_s=2000.0)
    asked = []
    producer = Producer(
        engine=engine,
        stream=PromptStream(SortDigits(8, size=64)),
        codec=TextCodec(MODEL),
        scorer=Scorer(lambda prompt, completion: 1.0),
        admission=Bounded().make(1000, 4),
        group_size=2,
        sampling=SamplingParams(max_tokens=10),
        timeout_s=20.0,
    )

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 7

    try:
        producer.start(0, should_stop)
        assert len(producer.book.groups) == 7
        assert producer.take(should_stop) is None
        with producer.changed:
            producer.wait.until(lambda: None if len(producer.book.in_state(GroupState.FINISHED)) < 7 else 0)
        assert len(producer.book.groups) == 7  # nor do rewards admit any
    finally:
        producer.stop()
        engine.close()


def test_an_admission_that_is_not_stopped_is_complete():
    steps, producer = simulated(Intake(), 2, lambda prompt, completion: 1.0, 3)
    assert [len(step) for step in steps] == [4, 4, 4]
    assert producer.admission.num_admissible == 0

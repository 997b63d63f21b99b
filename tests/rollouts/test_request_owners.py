"""Each request of an engine belongs to training or to one owner, by its id."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.judges.judge_policy import FIRST_QUESTION_ID
from lit_async_rl.rollouts.evaluation import FIRST_ID
from lit_async_rl.rollouts.request_owners import RequestOwner, RequestOwners
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams


@dataclass(eq=False)
class Owner:
    ids: list[int] = field(default_factory=list)
    is_waiting: bool = False

    def collect(self, completion: Completion) -> None: ...

    def lose(self, request_id: int, number: int | None = None) -> None: ...

    def again(self) -> list[GenerationRequest]:
        return [GenerationRequest(id=n, prompt_ids=(1,), num_samples=1, sampling=SamplingParams()) for n in self.ids]


def test_all_ids_belong_to_training_where_nobody_else_asks():
    owners = RequestOwners()
    assert [owners.of(number) for number in (-3, 0, 7, FIRST_ID, FIRST_QUESTION_ID)] == [None] * 5
    assert not owners.is_waiting
    assert owners.again() == []


@given(offset=st.integers(0, 2**38), judge_first=st.booleans())
def test_owners_have_the_ids_from_their_first_to_the_next_owner(offset, judge_first):
    evaluation, judge = Owner(), Owner()
    assert isinstance(evaluation, RequestOwner)
    owners = RequestOwners()
    pairs = [(FIRST_QUESTION_ID, judge), (FIRST_ID, evaluation)]
    for first_id, owner in pairs if judge_first else reversed(pairs):
        owners.add(first_id, owner)
    assert owners.of(FIRST_ID + offset) is evaluation
    assert owners.of(FIRST_QUESTION_ID + offset) is judge
    assert owners.of(FIRST_ID - 1 - offset) is None
    assert owners.of(-1 - offset) is None, "of continued samples of training"


def test_a_new_evaluation_has_the_ids_of_the_one_before():
    first, second = Owner([FIRST_ID], is_waiting=True), Owner([FIRST_ID + 5])
    owners = RequestOwners()
    owners.add(FIRST_ID, first)
    assert owners.is_waiting
    owners.add(FIRST_ID, second)
    assert owners.of(FIRST_ID) is second
    assert not owners.is_waiting
    assert [request.id for request in owners.again()] == [FIRST_ID + 5]

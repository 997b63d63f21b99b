"""Groups from their first request to the step that trains on them."""

from flow import MODEL

from lit_async_rl.engines.base import Completion, SamplingParams
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.types import Prompt


def test_a_group_that_is_given_up_before_any_rollout_began_has_no_tokens():
    book = GroupBook(TextCodec(MODEL), 2, SamplingParams(max_tokens=4))
    (request,) = book.open(0, 0, Prompt(text="3 1 2"), version=0)
    tokens, seconds = book.progress_of(0, [])
    assert tokens == 0.0
    assert seconds >= 0.0
    begun = Completion(
        request_id=request.id,
        sample_index=1,
        token_ids=(3, 4, 5),
        logprobs=(-1.0,) * 3,
        versions=(0,) * 3,
        finish_reason="abort",
    )
    assert book.progress_of(0, [begun])[0] == 3.0, "the mean over rollouts that began"
    assert book.give_up(0) == (request.id,)


def test_groups_may_be_admitted_while_a_notice_counts_those_that_lack_completions():
    book = GroupBook(TextCodec(MODEL), 2, SamplingParams(max_tokens=4))

    class MeanwhileAdmitted(dict):
        """Completions during whose count another thread admits a group."""

        def __len__(self):
            book.open(len(book.unfinished), 0, Prompt(text="3 1 2"), version=0)
            return super().__len__()

    for index in range(2):
        book.open(index, 0, Prompt(text="3 1 2"), version=0)
        book.unfinished[index].completions = MeanwhileAdmitted()
    assert [group.index for group in book.lacking] == [0, 1]
    assert len(book.unfinished) == 4

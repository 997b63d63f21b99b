"""Groups under way come back from a checkpoint's tensors as they were."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lit_async_rl.engines.base import Completion
from lit_async_rl.problem import Prompt
from lit_async_rl.rollouts.group_book import GroupEntry, GroupState, pack_groups, unpack_groups


def made(n, reason, reward, masked):
    completion = Completion(
        request_id=0,
        sample_index=n,
        token_ids=tuple(range(n)),
        logprobs=tuple(-0.1 * k for k in range(n)),
        versions=(n,) * n,
        finish_reason=reason,
        loss_mask=(True, False, True, False, True)[:n] if masked else None,
    )
    return completion if reward is None else completion.scored(reward)


def prompt_at(position: int) -> Prompt:
    return Prompt(text=f"number {position}")


completions = st.builds(
    made,
    st.integers(0, 5),
    st.sampled_from(["stop", "length", "abort"]),
    st.none() | st.floats(-1, 1),
    st.booleans(),
)


@settings(max_examples=30)
@given(st.lists(st.lists(completions, max_size=3), max_size=4))
def test_packed_groups_come_back_as_they_were(rows):
    groups = [
        GroupEntry(
            index=0,
            position=3 * n,
            prompt=prompt_at(3 * n),
            prompt_ids=tuple(range(n)),
            version=n,
            deadline=n + 1,
            generation_s=0.5 * n,
            state=GroupState.FINISHED if n % 2 else GroupState.SAMPLING,
            rollouts={completion.sample_index: completion for completion in row},
        )
        for n, row in enumerate(rows)
    ]
    assert unpack_groups(pack_groups(groups), prompt_at) == groups

"""Prompts from Gymnasium environments: one for each seed of a range."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.environments.gymnasium import GymnasiumPrompts


class Seeded:
    """Its first observation is its seed."""

    def reset(self, seed=None):
        return f"seed {seed}", {}


def prompts(**settings):
    return GymnasiumPrompts(lambda prompt: Seeded(), **settings)


@given(first=st.integers(0, 2**31), size=st.integers(1, 20))
def test_prompts_have_consecutive_seeds_from_the_first_on_and_an_end(first, size):
    found = list(islice(prompts(size=size, first_seed=first), size + 1))  # without an end it would be one more
    assert [prompt.metadata["seed"] for prompt in found] == list(range(first, first + size))
    assert [prompt.text for prompt in found] == [f"seed {prompt.metadata['seed']}" for prompt in found]


def test_disjoint_ranges_of_seeds_share_no_episode():
    train, validation = prompts(size=20, first_seed=0), prompts(size=20, first_seed=20)
    assert not {prompt.text for prompt in islice(train, 20)} & {prompt.text for prompt in islice(validation, 20)}


@pytest.mark.parametrize("index", [-1, 3, 10**9])
def test_a_prompt_outside_of_the_range_is_an_index_error(index):
    with pytest.raises(IndexError):
        prompts(size=3)[index]

"""Prompts, credits and branches of completions as tensors, each kept also where the others are missing."""

import dataclasses

import pytest

import lit_async_rl as rl
from lit_async_rl.rollouts.packed_branches import pack_branches, unpack_branches

PLAIN = rl.Completion(
    request_id=0, sample_index=0, token_ids=(3, 4), logprobs=(-1.0, -2.0), versions=(0, 0), finish_reason="stop"
)
BRANCH = rl.types.Branch(
    prompt_ids=(5, 6), token_ids=(7,), logprobs=(-0.5,), versions=(1,), loss_mask=(True,), credit=0.25
)


@pytest.mark.parametrize("changes", [{"prompt_ids": (1, 2)}, {"credit": 0.5}, {"branches": (BRANCH,)}], ids=list)
def test_each_field_is_kept_alone(changes):
    changed = dataclasses.replace(PLAIN, **changes)
    packed = pack_branches([PLAIN, changed])
    plain, found = unpack_branches(packed, 2)
    for name in ("prompt_ids", "credit", "branches"):
        assert found[name] == getattr(changed, name)
        assert plain[name] == getattr(PLAIN, name)


def test_nothing_is_kept_of_completions_without_any():
    assert pack_branches([PLAIN, PLAIN]) == {}

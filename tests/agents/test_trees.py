"""Random conversation trees with updates in flight: the record of an agent is what was sampled, and trains once.

`python benchmarks/agents/trees.py` plays 2,000 of them.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.agents.trees import TOLERANCES, Forest

seeds = st.lists(st.integers(0, 2**32), min_size=15, max_size=15, unique=True)


@pytest.fixture(scope="module")
def forest():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Forest()
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(170)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seeds=seeds)
def test_recorded_tokens_have_their_probabilities_and_train_once(forest, seeds):
    found = forest.check(seeds)
    assert max(one.error for one in found) <= TOLERANCES["float64"]
    assert sum(one.num_rows for one in found) > 2 * len(found)
    assert max(one.num_versions for one in found) > 1

"""Every public callback through the same trials: on our own runs, all at once; on modules that know nothing of us."""

import pytest
from battery import SITUATIONS, TRAJECTORY, discovered, run

from lit_async_rl import callbacks

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


def test_every_callback_of_the_package_is_public():
    assert set(discovered()) == set(callbacks.__all__)
    assert all(getattr(callbacks, name) is kind for name, kind in discovered().items())


@pytest.mark.parametrize("kind", ["policy", "trajectory"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_our_runs(situation, kind, tmp_path):
    run(tmp_path, kind, **SITUATIONS[situation])

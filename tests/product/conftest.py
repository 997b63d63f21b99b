"""The preloaded process, which all tests of the product share."""

from collections.abc import Iterator

import pytest
from preloaded import Preloaded


@pytest.fixture(scope="session")
def process() -> Iterator[Preloaded]:
    process = Preloaded()
    yield process
    process.close()

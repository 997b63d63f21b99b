"""One thread for each test process (or OMP_NUM_THREADS), no time limits inside hypothesis (the machine may be busy).

No test reaches the network.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import quick_parsing
import torch
import type_checks
from hypothesis import settings
from preloaded import Preloaded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs, and all inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
jaxtyping.jaxtyped = type_checks.jaxtyped  # before the package is loaded
quick_parsing.remember()
settings.register_profile("lit_async_rl", deadline=None)
settings.load_profile("lit_async_rl")
gc.disable()  # what is imported now stays: until all of it is there no collection looks at it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with a mark are wanted (`-m "slow and not ray"`), files that do not name it are not imported."""
    wanted = [mark for mark in config.option.markexpr.split(" and ") if mark.isidentifier()]
    if wanted and collection_path.name.startswith("test_"):
        text = collection_path.read_text()
        return True if any(f"mark.{mark}" not in text for mark in wanted) else None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collections within tests look at what tests made, not at the millions of objects of all imported packages."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def process() -> Iterator[Preloaded]:
    """The preloaded process, for commands that need not be an interpreter's first."""
    process = Preloaded()
    yield process
    process.close()


@pytest.fixture
def in_float64(monkeypatch):
    """Casts to float32 (in norms, eager attention, and of logits) are left out where values are in float64."""
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def soft(values, dim=None, dtype=None, **options):
        return softmax(values, dim=dim, dtype=None if values.dtype == torch.float64 else dtype, **options)

    def kept(self, *args, **kwargs):
        is_cast = self.dtype == torch.float64 and args[:1] == (torch.float32,)
        return self if is_cast else to(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", soft)
    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_float(self))

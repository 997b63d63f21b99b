"""Lets vLLM start its processes as forks of one that has imported it: a new one imports for ten seconds of a core.

As `launch` does for ranks. Processes that vLLM starts in a new interpreter are those of a trainer that tests start
themselves (`test_nothing_survives_a_trainer_that_is_killed`), and of actors on Ray.
"""

import multiprocessing
import os
from importlib.util import find_spec

import pytest
import torch

from lit_async_rl.runtime.lifetime import die_with_parent
from lit_async_rl.vllm.process import engine_environment

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "lit_async_rl.vllm.worker"]


class Fork(FORKS.Process):
    """A process with the environment at its start, as a new interpreter has it."""

    def start(self):
        self._environment = dict(os.environ)
        super().start()

    def run(self):
        from setproctitle import getproctitle  # vLLM's requirement

        getproctitle()  # finds the title's place by the environment that is still there
        os.environ.clear()
        os.environ.update(self._environment)
        # its parent is not the one that multiprocessing names, with which it would end
        del os.environ["LIT_ASYNC_RL_DIE_WITH_PARENT"]
        die_with_parent(os.getppid())
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class ForkContext(type(FORKS)):
    Process = Fork


@pytest.fixture(scope="session", autouse=True)
def vllm_starts_forks():
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm") is not None:
            with engine_environment({}, num_threads=1):  # vLLM reads some of it when it is imported
                import vllm.v1.engine.utils
            FORKS.set_forkserver_preload(IMPORTED)
            patch.setattr(vllm.v1.engine.utils, "get_mp_context", ForkContext)
        yield

"""Asynchronous reinforcement learning of language models on Lightning.

    Prompt -> Rollout -> RolloutGroup -> RolloutBatch -> loss per token -> gradient -> weights -> engine
    prompts   engines    rollouts        data            losses           training     WeightSync

Nothing downstream calls upstream, except `WeightSync`, which closes the circle: it hands the engine the new weights and
gives the producer its slots back. All public names are attributes of this package, imported when they are first used.
"""

import sys
import warnings
from typing import Any

import lazy_loader

__version__ = "0.1.0"
_NEED_ALL = ("fit", "Trainer", "PolicyModule", "RolloutDataModule")
_found, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
warnings.filterwarnings("ignore", message="IProgress not found")  # in notebooks, of bars that are off here


def __getattr__(name: str) -> Any:
    """Imports a public name. A person who waits for the first of those that need all libraries is told why."""
    if name in _NEED_ALL and sys.stderr is not None and sys.stderr.isatty():
        from lit_async_rl.utils.loading import loading

        with loading():
            return _strict(_found(name))
    return _strict(_found(name))


def _strict(found: Any) -> Any:
    """A public name; a class whose constructor refuses None where its annotations do."""
    if isinstance(found, type):
        from lit_async_rl.utils.checks import refuse_none

        refuse_none(found)
    return found

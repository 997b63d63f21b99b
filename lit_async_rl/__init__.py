"""Asynchronous reinforcement learning of language models on Lightning.

    Prompt -> Rollout -> RolloutGroup -> RolloutBatch -> loss per token -> gradient -> weights -> engine
    prompts   engines    rollouts        data            losses           training     WeightSync

Nothing downstream calls upstream, except `WeightSync`, which closes the circle: it hands the engine the new weights and
gives the producer its slots back. All public names are attributes of this package, imported when they are first used.
"""

import warnings

import lazy_loader

__version__ = "0.1.0"
_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "Intake":
        raise AttributeError("lit_async_rl.Intake is now arguments of RolloutDataModule (docs/migration.md)")
    return _public_name(name)


warnings.filterwarnings("ignore", message="IProgress not found")  # in notebooks, of bars that are off here

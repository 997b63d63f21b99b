"""Asynchronous reinforcement learning of language models on Lightning.

    Prompt -> Rollout -> RolloutGroup -> RolloutBatch -> loss per token -> gradient -> weights -> engine
    prompts   engines    rollouts        data            losses           training     WeightSync

Nothing downstream calls upstream, except `WeightSync`, which closes the circle: it hands the engine the new weights and
gives the producer its slots back. All public names are attributes of this package, imported when they are first used.
"""

import warnings

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
warnings.filterwarnings("ignore", message="IProgress not found")  # in notebooks, of bars that are off here

"""Asynchronous reinforcement learning of language models on Lightning.

    Prompt -> Rollout -> RolloutGroup -> RolloutBatch -> loss per token -> gradient -> weights -> engine
    prompts   engine     producer        batching        losses           module      WeightSync

Nothing downstream calls upstream, except `WeightSync`, which closes the circle: it hands the engine the new weights
and gives the producer its slots back. Importing this package is cheap; import the parts from their own files.
"""

__version__ = "0.1.0"

"""Callbacks: weight synchronisation, stabilizers that change the step, monitors that change nothing.

Each is imported on first use, so that a stabilizer in another trainer loads no engine.
"""

from lit_async_rl.utils.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=("LMEvalValidation", "ReplicaScaling"))

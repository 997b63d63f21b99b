"""Multi-turn environments, and the engine that runs episodes in them."""

from lit_async_rl.utils.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=("PythonTool",))

"""Multi-turn environments, and the engine that runs episodes in them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

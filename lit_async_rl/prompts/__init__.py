"""Prompt sources, the order in which they are sampled, and curricula."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Advantage estimators: rewards of groups, or of single turns, to an advantage per token."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

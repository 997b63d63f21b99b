"""Advantage estimators: from the rewards of groups, or of single turns, to an advantage for each token."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

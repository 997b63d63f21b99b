"""The off-policy optimal baseline, and the per-rollout gradient norms that it is made of."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Training on recorded data: the replay buffer, the rollout tape, and training from a tape."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

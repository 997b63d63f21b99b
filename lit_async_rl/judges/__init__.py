"""Rewards by language models: judges behind a server, on their own engine or the policy's, and reward models.

Nothing outside imports this package: a reward is found by name, and says what it needs by the methods in
`lit_async_rl.rewards.hooks`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

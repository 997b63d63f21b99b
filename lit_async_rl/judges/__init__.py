"""Rewards that ask a language model: judges behind a server, on an engine of their own, the policy, reward models.

Nothing outside imports this package: a reward is found by its name, and tells the rest by the methods in
`lit_async_rl.rewards.hooks` what it needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

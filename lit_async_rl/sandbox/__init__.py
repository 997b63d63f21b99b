"""A sandbox for programs that a policy has written.

The processes inside import modules of this package one by one, without the package's own `__init__`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

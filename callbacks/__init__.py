"""Callbacks: weight synchronisation, stabilizers that change the step, monitors that change nothing.

Each is imported on first use, so that a stabilizer in another trainer loads no engine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

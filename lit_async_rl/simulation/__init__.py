"""Simulated engines and runs in virtual time, without a model: for tests and for comparing schedules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

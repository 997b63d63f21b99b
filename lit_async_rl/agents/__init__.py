"""Agents: programs that call the policy as a client calls a server, trained as they are."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

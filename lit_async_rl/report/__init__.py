"""Reports of runs: one HTML file, or a page served during the run. Run folders are only read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

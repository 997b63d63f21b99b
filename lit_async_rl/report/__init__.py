"""Reports of runs: one HTML file, or a page served while the run goes on. Reads run folders, and never writes to them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The DataModule: from finished groups to the micro-batches of one optimizer step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

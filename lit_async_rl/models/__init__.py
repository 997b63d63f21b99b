"""The policy network: loading, tokenizer, packing, LoRA, sharding, and the names of its weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

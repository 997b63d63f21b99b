"""One thread for each test process, no time limits inside hypothesis (the machine may be busy), no network."""

import os

import jaxtyping
import torch
import type_checks
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
jaxtyping.jaxtyped = type_checks.jaxtyped  # before the package is loaded
settings.register_profile("lit_async_rl", deadline=None)
settings.load_profile("lit_async_rl")

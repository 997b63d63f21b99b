"""Run by two processes: loads a policy in pieces, compares it with the plain load, and measures memory.

python sharded_loading.py STRATEGY FOLDER OUTPUT.json
"""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.sharding import FSDPStrategy, Sharding
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.training.module import PolicyModule

RANK = int(os.environ.get("RANK", "0"))


def make_strategy(name: str):
    if name == "fsdp1":
        return FSDPStrategy(state_dict_type="sharded")
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(*((1, 2) if name == "tp" else (2, 1)))


class Peak:
    """The most memory of this process's own (not of mapped files) while it lasts, in MB above what was there before."""

    def __enter__(self):
        gc.collect()
        self._ended = threading.Event()
        self._before = self._read()
        self.mb = 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.is_set():
            self.mb = max(self.mb, self._read() - self._before)
            time.sleep(0.001)

    def _read(self) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class Measured(PolicyModule):
    """Says what it took to get weights, and ends the run."""

    def configure_model(self) -> None:
        with Peak() as peak:
            super().configure_model()
        self.peak_mb = peak.mb
        own = list(self.policy.parameters())
        local = [p.to_local() if hasattr(p, "to_local") else p for p in own]
        self.kept_mb = sum(p.numel() * p.element_size() for p in local) / 2**20


def main(strategy: str, folder: str, output: str) -> None:
    with Peak() as building:
        module = Measured(folder, sharding=Sharding(meta_device=True))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(module, [], verbose=False)
    result = dict(built_mb=building.mb, peak_mb=module.peak_mb, kept_mb=module.kept_mb)
    plain = load_policy(folder)
    expected = dict(plain.named_parameters())
    root = trainer.strategy.model
    seen = {name: bool(torch.equal(w, expected[name])) for name, w in stream_weights(module.policy, root)}
    assert seen.keys() == expected.keys()
    result["equal"] = all(seen.values())
    result["buffers"] = all(
        torch.equal(a, b) for a, b in zip(module.policy.causal_lm.buffers(), plain.buffers(), strict=True)
    )
    ids = torch.arange(24).reshape(2, 12) % 60
    mask = torch.ones_like(ids, dtype=torch.bool)
    own = module.policy(ids, mask).logprobs
    plain_ones = CausalPolicy(plain)(ids, mask).logprobs
    result["logprob_error"] = float((own - plain_ones).abs().max() / plain_ones.abs().max())
    Path(f"{output}.{RANK}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Small modules that know nothing of this package, a trainer for them, and what tests compare."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROWS = 6
TOKENS = 4
WIDTH = 3


class Rows(Dataset):
    """`count` seeded rows: features, tokens' log-ratios, a mask with at least one token and a completely masked row."""

    def __init__(self, count: int = 64, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.log_ratio = torch.randn(count, TOKENS, generator=generator) * scale
        self.mask = torch.rand(count, TOKENS, generator=generator) > 0.3
        self.mask[:, 0] = True
        self.mask[3] = False
        self.reward = torch.rand(count, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        return {"x": self.x[n], "log_ratio": self.log_ratio[n], "mask": self.mask[n], "rewards": self.reward[n]}


class Regression(pl.LightningModule):
    """Signals by attribute, a loss that differs from step to step."""

    def __init__(self, make_optimizer: Callable[..., Any] | None = None, make_scheduler: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))
        self.make_optimizer = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))
        self.make_scheduler = make_scheduler
        self.stabilizer_signals: dict[str, Any] = {}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(batch["x"]).squeeze(-1) - batch["rewards"]).square().mean()

    def signals(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {name: batch[name] for name in ("log_ratio", "mask", "rewards")} | {"entropy": batch["log_ratio"].abs()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.stabilizer_signals = self.signals(batch)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }


class Probe(pl.Callback):
    """Notes the learning rate that each step really used, and what was logged."""

    def __init__(self) -> None:
        self.used_lr: list[float] = []
        self.scheduled_lr: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.used_lr.append(float(optimizer.param_groups[0]["lr"]))

        # first in line, so that it sees the rate before anybody restores it
        trainer.optimizers[0].register_step_post_hook(note)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scheduled_lr.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(module: pl.LightningModule, *callbacks: Any, trainer_class: Any = pl.Trainer, data: Any = None, **kwargs: Any):
    """Trains on the CPU without any output; `max_steps` is 6 unless told otherwise."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    settings = dict(max_steps=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    settings |= dict(enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    trainer = trainer_class(callbacks=list(callbacks), **(settings | kwargs))
    trainer.fit(module, data or DataLoader(Rows(), batch_size=ROWS), ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()

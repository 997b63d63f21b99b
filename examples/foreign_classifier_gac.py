"""Gradient alignment control in an image classifier that is independent of this package.

    python examples/foreign_classifier_gac.py

`Classifier` needs no changes: the callback uses the gradients only. The images are blurred prototypes with noise,
generated on the fly.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_async_rl.callbacks import GradientAlignmentControl


class Classifier(pl.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(10),
        )
        self.net(torch.zeros(1, 1, 16, 16))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def images(count: int = 2048, noise: float = 0.7, seed: int = 0) -> TensorDataset:
    """Ten random prototypes with noise, many samples each."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = F.avg_pool2d(torch.randn(10, 1, 18, 18, generator=generator), 3, stride=1) * 3
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(prototypes[labels] + noise * torch.randn(count, 1, 16, 16, generator=generator), labels)


def main(max_epochs: int = 2) -> dict[str, float]:
    """Trains and returns the last metrics."""
    pl.seed_everything(0, verbose=False)
    # the first 20 steps show how aligned consecutive gradients ordinarily are; from then on the rest is projected out
    gac = GradientAlignmentControl(low=0.0, high=0.9, calibrate_steps=20)
    trainer = pl.Trainer(
        max_epochs=max_epochs, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[gac]
    )
    trainer.fit(Classifier(), DataLoader(images(), batch_size=64, shuffle=True))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:24} {value:.3f}")

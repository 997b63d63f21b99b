"""Lightning is published as two packages whose classes are not each other's; the stabilizers work with both."""

from typing import Any, TypeAlias

AnyTrainer: TypeAlias = Any  # lightning.pytorch.Trainer or pytorch_lightning.Trainer
AnyModule: TypeAlias = Any  # the LightningModule of either

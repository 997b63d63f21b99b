"""Type aliases over the two Lightning packages (`lightning`, `pytorch_lightning`), whose classes differ."""

from typing import Any, TypeAlias

AnyTrainer: TypeAlias = Any  # lightning.pytorch.Trainer or pytorch_lightning.Trainer
AnyModule: TypeAlias = Any  # the LightningModule of either

"""The LightningModule: objective, validation, checkpoints."""

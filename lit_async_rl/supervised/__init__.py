"""Supervised fine-tuning: the stage before RL, on its model, packing, checkpoints and run."""

"""vLLM in child processes of the trainer, and the transfer of weights to it."""

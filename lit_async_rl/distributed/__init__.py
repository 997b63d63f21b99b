"""Distributed training: leading rank, exchange of a step's data, and detection of dead or hanging ranks."""

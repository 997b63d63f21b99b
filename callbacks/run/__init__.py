"""Callbacks that run the training: weight synchronisation, evaluation, progress, tape, samples, saving."""

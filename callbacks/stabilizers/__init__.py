"""Stabilizers: callbacks that modify gradients, learning rate, loss or staleness bound."""

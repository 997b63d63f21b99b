"""Stabilizers: callbacks that change the step."""

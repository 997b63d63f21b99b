"""The embedded engine: continuous batching in this process with transformers' models."""

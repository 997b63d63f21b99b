"""Argument checks, identities, secrets, configuration of objects, and memory."""

"""Argument checks, clocks, locks, the event-loop thread, files, and isolated child processes."""

"""Threads, event loops, child processes, time limits, retries and files: what runs beside the code that uses it."""

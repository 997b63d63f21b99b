"""Monitors: callbacks that log and change nothing."""

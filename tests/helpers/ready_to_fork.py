"""Importing it makes this process ready: forks of it have imported everything, and parse commands quickly."""

from preloaded import preload

preload()

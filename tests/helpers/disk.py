"""A disk without room."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(most=100):
    """No file of this process may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

"""Ranges that many settings have in common."""

from __future__ import annotations


def check_positive(part: str, **settings: int | float) -> None:
    """Refuses numbers that are not positive.

    Args:
        part: of the YAML that the settings stand in, such as `data`.
        settings: by name.

    Raises:
        ValueError: one is not.
    """
    for name, value in settings.items():
        if value <= 0:
            raise ValueError(f"{part}.{name} must be positive, got {value}")


def check_not_negative(part: str, **settings: int | float) -> None:
    """Refuses negative numbers, see `check_positive`.

    Raises:
        ValueError: one is negative.
    """
    for name, value in settings.items():
        if value < 0:
            raise ValueError(f"{part}.{name} must be >= 0, got {value}")

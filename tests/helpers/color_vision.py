"""Colours as people see them: contrast (WCAG 2), and with a missing kind of cones."""

from __future__ import annotations

import numpy as np

CONE_LOSS = {  # Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def linear(text: str) -> np.ndarray:
    """Linear RGB of a computed CSS colour, `rgb(r, g, b)`."""
    values = np.array([float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(color: np.ndarray) -> float:
    """Relative luminance."""
    return float(color @ [0.2126, 0.7152, 0.0722])


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """Contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def seen(kind: str, color: np.ndarray) -> np.ndarray:
    """The colour without one kind of cones."""
    return np.clip(np.array(CONE_LOSS[kind]) @ color, 0, 1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Of two colours in sRGB, where black and white are 1.7 apart."""
    encoded = [np.where(c <= 0.0031308, 12.92 * c, 1.055 * c ** (1 / 2.4) - 0.055) for c in (one, other)]
    return float(np.linalg.norm(encoded[0] - encoded[1]))

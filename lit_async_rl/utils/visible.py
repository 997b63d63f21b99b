"""Text of a model for a terminal: a completion must not move the cursor, set titles or turn lines around."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t\u200c\u200d"  # joiners are parts of words and emoji
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, surrogates, separators of lines
FIRST_PICTURE = 0x2400  # of the characters that show control characters
NUM_PICTURES = 0x20


def visible(text: str) -> str:
    """Text in which control characters are shown (`␛`, `⟨U+202E⟩`); lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in HIDDEN:
        return character
    number = ord(character)
    return chr(FIRST_PICTURE + number) if number < NUM_PICTURES else f"⟨U+{number:04X}⟩"

"""Text that can be printed, whatever is in it."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Text whose control characters are spelled out, but for line ends and tabs."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character)[0] != "C" else f"\\u{ord(character):04x}"
        for character in text
    )

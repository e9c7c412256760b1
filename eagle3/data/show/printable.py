"""Text that can be printed, whatever is in it."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Text whose control characters are spelled out, but for line ends and tabs."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character)[0] != "C" else f"\\u{ord(character):04x}"
        for character in text
    )


def printable_name(name: str, longest: int = 60) -> str:
    """A name for one cell or line of a report: line ends and tabs are spelled out too, and a long one is cut."""
    text = printable(name[: longest + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(name) <= longest else f"{text[:longest]}..."

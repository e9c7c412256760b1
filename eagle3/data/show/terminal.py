"""Samples for a terminal: neighbouring tokens in two shades, supervised ones in green."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from eagle3.data.show.pieces import Piece, ShownSample
from eagle3.data.show.printable import printable

_SHADES = {False: ("default", "on grey23"), True: ("black on green3", "black on spring_green3")}
CONTINUES = "·"
"""A token that only ends a character which began before it."""


def print_samples(samples: Sequence[ShownSample], about: str, console: Console) -> None:
    """Prints them; without colours, tokens are parted by `¦` and supervised ones are in `{+ +}`."""
    colours = console.is_terminal and not console.no_color
    for sample in samples:
        console.print(Text(f"sample {printable(sample.id)}: {sample.counts}", style="bold"))
        console.print(_coloured(sample.pieces) if colours else Text(marked(sample.pieces)))
        console.print()
    console.print(Text(printable(about)))


def marked(pieces: Sequence[Piece]) -> str:
    """Tokens parted by `¦`, supervised runs in `{+ +}`."""
    text, before = "", False
    for number, piece in enumerate(pieces):
        joint = "+}" * (before and not piece.supervised) + "{+" * (piece.supervised and not before)
        text += (joint or ("¦" if number else "")) + visible(piece)
        before = piece.supervised
    return text + "+}" * before


def visible(piece: Piece) -> str:
    """The token's text, with line ends that can be seen."""
    return piece.text.replace("\n", "↵\n") or CONTINUES


def _coloured(pieces: Sequence[Piece]) -> Text:
    return Text.assemble(
        *((visible(piece), _SHADES[piece.supervised][number % 2]) for number, piece in enumerate(pieces))
    )

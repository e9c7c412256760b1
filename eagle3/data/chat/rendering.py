"""What became of one conversation."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.data.chat.render import Rendered
from eagle3.errors import Problem


@dataclass(frozen=True)
class Rendering:
    """A conversation's samples with their names, or why it has none.

    Attributes:
        id: of the conversation.
    """

    id: str
    samples: tuple[tuple[str, Rendered], ...]
    problems: tuple[Problem, ...]

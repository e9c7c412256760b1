"""Pictures of results. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.errors import problem_error
from eagle3.files import write_atomic

KINDS = (".png", ".svg", ".pdf")


def new_figure(path: Path, kind: str, width: float, height: float) -> Any:
    """A figure that `save_figure` can write to `path`.

    Args:
        kind: of the problem.
        width, height: in inches.

    Raises:
        ProblemsError: matplotlib is not installed, or the file's name does not say a kind that it writes.
    """
    if path.suffix.lower() not in KINDS:
        message = f"the kind of picture {path.suffix!r} is not known"
        raise problem_error(str(path), kind, message, f"name it {', '.join(KINDS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'eagle3[plot]', or leave out --plot"
        raise problem_error(str(path), kind, "matplotlib is not installed", fix) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes it whole or not at all."""
    kind = path.suffix.lower().removeprefix(".")
    write_atomic(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=150))

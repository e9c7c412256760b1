"""Problems that a user can act on, and the one exception that carries them.

A check returns `list[Problem]`; only the boundary (a command, a constructor, a writer) raises. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

EXIT_OK = 0
EXIT_PROBLEMS = 2
EXIT_STOPPED = 75
"""Asked to stop, and saved: sysexits.h's EX_TEMPFAIL, "try again"."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: the file, config key or object it was found in.
        kind: a stable dotted name, e.g. `layers.out_of_range`; safe to match on.
        message: what was found and what was expected.
        fix: what to do about it.
    """

    where: str
    kind: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.where}: {self.message}\n    fix: {self.fix}"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class Eagle3Error(ValueError):
    """Base of every error that is the input's fault; the command line turns it into exit code 2."""


class ProblemsError(Eagle3Error):
    """One or more problems, all of them listed in the message."""

    def __init__(self, problems: Iterable[Problem], title: str | None = None) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise AssertionError("ProblemsError needs at least one problem")
        self.title = title
        count = len(self.problems)
        head = title or ("1 problem" if count == 1 else f"{count} problems")
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[tuple[Problem, ...], str | None]]:
        return type(self), (self.problems, self.title)


def problem_error(where: str, kind: str, message: str, fix: str) -> ProblemsError:
    """A `ProblemsError` of a single problem, for `raise problem_error(...)`."""
    return ProblemsError([Problem(where, kind, message, fix)])


def raise_problems(problems: Iterable[Problem], title: str | None = None) -> None:
    """Raises `ProblemsError` if there is any problem.

    Raises:
        ProblemsError: listing all of them.
    """
    found = tuple(problems)
    if found:
        raise ProblemsError(found, title)

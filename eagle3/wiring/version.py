"""Release numbers of serving engines, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from eagle3.errors import problem_error

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.post(\d+))?(?:\+[A-Za-z0-9.]+)?")
_LONGEST = 100


@dataclass(frozen=True, order=True)
class Version:
    """A released version such as `0.5.12.post1`; a local label (`+cu129`) does not count.

    Raises:
        ProblemsError: kind `engine.version_malformed`; also for pre-releases, whose rules nobody read.
    """

    text: str = field(compare=False)
    release: tuple[int, ...] = field(init=False)
    post: int = field(init=False)

    def __post_init__(self) -> None:
        short = isinstance(self.text, str) and len(self.text) <= _LONGEST
        match = _VERSION.fullmatch(self.text) if short else None
        if match is None:
            message = f"{self.text!r} is not a released version"
            raise problem_error("engine_version", "engine.version_malformed", message, "write e.g. 0.5.12.post1")
        numbers = [int(part) for part in match[1].split(".")]
        while numbers[-1] == 0 and len(numbers) > 1:
            numbers.pop()
        object.__setattr__(self, "release", tuple(numbers))
        object.__setattr__(self, "post", int(match[2]) if match[2] else -1)

    def __str__(self) -> str:
        return self.text

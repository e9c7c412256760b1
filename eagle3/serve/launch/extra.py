"""Arguments that a user adds by hand, against those that the config gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eagle3.errors import Problem
from eagle3.serve.launch.flags import CHANGED, FIRST_READ, LAST_READ, canonical, takes
from eagle3.wiring.version import Version

WHERE = "extra_args"
GRAPHS_OFF = frozenset(
    {
        "--disable-cuda-graph",
        "--disable-decode-cuda-graph",
        "--cuda-graph-backend-decode",
        "--cuda-graph-config",
        "--enforce-eager",
    }
)


def check_extra(
    extra: Sequence[str], given: Mapping[str, str], cuda_graphs: bool, version: Version | None
) -> Iterator[Problem]:
    """Added arguments that say again, or otherwise, what the config says, or that this release does not take.

    Args:
        extra: the arguments.
        given: argument -> config key that gives it, of all that the command holds already.
        cuda_graphs: the config wants CUDA graphs.
        version: SGLang release, to find renamed arguments; None for another engine.
    """
    seen: set[str] = set()
    if extra and not extra[0].startswith("-"):
        yield Problem(WHERE, "launch.extra_args", f"begin with {extra[0]!r}, no argument's name", "begin with --NAME")
    for flag in (item for item in extra if item.startswith("--")):
        name = canonical(flag)
        owner = given.get(name) or _abbreviated(name, given)
        if owner is not None:
            message = f"{flag} is what {owner} says already"
            yield Problem(WHERE, "launch.extra_args", message, f"leave it out and set {owner}")
        elif cuda_graphs and name in GRAPHS_OFF and not _keeps_graphs(flag):
            message = f"{flag} may switch off the CUDA graphs that cuda_graphs=true promises"
            yield Problem(
                WHERE, "launch.extra_args", message, "leave it out and set cuda_graphs=false, if that is meant"
            )
        elif name in seen:
            yield Problem(WHERE, "launch.extra_args", f"{flag} is given twice", "give it once")
        elif version is not None and name in CHANGED and not takes(name, version):
            first, last = CHANGED[name]
            message = f"SGLang {version} does not take {flag}: of {FIRST_READ} to {LAST_READ}, {first} to {last} do"
            yield Problem(WHERE, "launch.extra_args", message, "leave it out, or use this release's name for it")
        seen.add(name)


def _abbreviated(name: str, given: Mapping[str, str]) -> str | None:
    """The config key of an argument that argparse would take this beginning of a name for."""
    matches = {key for full, key in given.items() if full.startswith(name) and len(name) > len("--")}
    return min(matches, default=None)


def _keeps_graphs(flag: str) -> bool:
    name, _, value = flag.partition("=")
    return name == "--cuda-graph-backend-decode" and value not in ("", "disabled")

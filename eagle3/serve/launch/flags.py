"""Which arguments each SGLang release takes, of those that matter here.

Read in `sglang/srt/server_args.py` (from 0.5.20 on `sglang/srt/arg_groups/fields/*.py`) of every release from 0.5.8 to
0.5.23. An argument that is not listed in `CHANGED` is in all of them. A release outside that range is unknown: nobody
read what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.errors import problem_error
from eagle3.wiring.version import Version

FIRST_READ, LAST_READ = "0.5.8", "0.5.23"
FIRST_WITH_READY = "0.5.20"
"""The first with `/ready` (`sglang/srt/entrypoints/http_server.py`; 0.5.19 has none)."""

# Renamed or new arguments: (first, last) release that takes them.
CHANGED = {
    "--cuda-graph-max-bs": ("0.5.8", "0.5.19"),
    "--cuda-graph-max-bs-decode": ("0.5.14", "0.5.23"),
    "--cuda-graph-bs": ("0.5.8", "0.5.19"),
    "--cuda-graph-bs-decode": ("0.5.14", "0.5.23"),
    "--disable-prefill-cuda-graph": ("0.5.14", "0.5.23"),
    "--disable-decode-cuda-graph": ("0.5.14", "0.5.23"),
    "--cuda-graph-backend-decode": ("0.5.14", "0.5.23"),
    "--cuda-graph-config": ("0.5.14", "0.5.23"),
    "--disable-piecewise-cuda-graph": ("0.5.10", "0.5.19"),
    "--enable-piecewise-cuda-graph": ("0.5.8", "0.5.13.post1"),
}

# Other spellings of the same argument.
ALIASES = {
    "--model": "--model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
}


@dataclass(frozen=True)
class GraphFlags:
    """How a release calls what has to do with CUDA graphs.

    Attributes:
        max_batch: argument of the largest batch.
        no_prefill: switches prefill's off; None where a release has none by itself.
    """

    max_batch: str
    no_prefill: str | None


def check_read(version: str) -> Version:
    """The version, if somebody read what it takes.

    Raises:
        ProblemsError: kinds `launch.version_unknown`, `engine.version_malformed`.
    """
    found = Version(version)
    if not Version(FIRST_READ) <= found <= Version(LAST_READ):
        message = f"which arguments it takes was read for {FIRST_READ} to {LAST_READ} only"
        fix = "serve with one of these, or add what it takes to eagle3/serve/launch/flags.py with its source"
        raise problem_error(f"SGLang {version}", "launch.version_unknown", message, fix)
    return found


def graph_flags(version: Version) -> GraphFlags:
    """The names for this release."""
    new = takes("--cuda-graph-max-bs-decode", version)
    no_prefill = "--disable-prefill-cuda-graph" if new else "--disable-piecewise-cuda-graph"
    return GraphFlags(
        "--cuda-graph-max-bs-decode" if new else "--cuda-graph-max-bs",
        no_prefill if takes(no_prefill, version) else None,
    )


def takes(flag: str, version: Version) -> bool:
    """Whether the release takes an argument that some of them do not."""
    first, last = CHANGED.get(flag, (FIRST_READ, LAST_READ))
    return Version(first) <= version <= Version(last)


def canonical(flag: str) -> str:
    """One spelling of an argument: `--tp=8` and `--tensor_parallel_size` are `--tp-size`."""
    name = flag.partition("=")[0].replace("_", "-")
    return ALIASES.get(name, name)

"""What lines of SGLang's log mean.

Read in the releases 0.5.8, 0.5.10.post1, 0.5.13.post1, 0.5.16, 0.5.20 and 0.5.23: `model_executor/model_runner.py`,
`model_executor/model_runner_components/cuda_graph_setup.py`, `model_executor/**/*cuda_graph_runner.py`,
`speculative/eagle_worker*.py`, `model_loader/weight_utils.py`, `mem_cache/memory_pool.py`, `entrypoints/http_server.py`
and `entrypoints/engine.py` under `sglang/srt`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

LONGEST = 2000
"""Characters of a line that are looked at, but for `server_args=`."""
READY = "The server is fired up and ready to roll!"
ARGUMENTS = "server_args="
_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]+\d+)*) ?\] ?(.*)", re.DOTALL)
_BAR = re.compile(r"(\d+)/(\d+) \[([\d:]+)<([\d:?]+)")
_CAPTURE = re.compile(r"Capture (?P<what>.*?) ?(?:cuda|CUDA) graph (?P<end>begin|end)\b")
_ACCESS = re.compile(r'(\S{1,100}):\d+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})')
_TIMING = re.compile(r"(\w+)=(\d+(?:\.\d*)?)")

# What old and new releases call each capture: field of `Graphs`, or "prefill". The empty name is an old release's only
# one, decode or verify.
_GRAPHS = {
    "": "target",
    "target decode": "decode",
    "target verify": "verify",
    "draft": "draft",
    "draft decode": "draft",
    "draft extend": "draft_extend",
    "target prefill": "prefill",
    "draft prefill": "prefill",
    "piecewise": "prefill",
}


@dataclass(frozen=True)
class Line:
    """A line without its prefix.

    Attributes:
        time: seconds, by the server's clock; None if it does not say.
        leading: written by the first rank, or by no rank.
        text: the rest.
    """

    time: float | None
    leading: bool
    text: str


@dataclass(frozen=True)
class Bar:
    """A progress bar: how many of how many, and the seconds left, by its own reckoning."""

    done: int
    total: int
    seconds_left: float | None


@dataclass(frozen=True)
class Access:
    """A request that the server answered."""

    client: str
    method: str
    path: str
    status: int


def split_line(line: str) -> Line:
    """Takes the time and the rank off."""
    match = _PREFIX.match(line)
    if match is None:
        return Line(None, True, line[:LONGEST])
    try:
        time = datetime.fromisoformat(match[1]).timestamp()
    except ValueError:
        time = None
    leading = all(rank.strip("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == "0" for rank in match[2].split())
    return Line(time, leading, match[3] if match[3].startswith(ARGUMENTS) else match[3][:LONGEST])


def find_bar(text: str) -> Bar | None:
    """The last progress bar in a line."""
    bars = list(_BAR.finditer(text))
    return Bar(int(bars[-1][1]), int(bars[-1][2]), _seconds(bars[-1][4])) if bars else None


def find_capture(text: str) -> tuple[str, bool] | None:
    """Which graphs begin (False) or have ended (True) to be captured: a name of `Graphs`, `prefill`, or `target` where
    an old release does not say whether it decodes or verifies."""
    match = _CAPTURE.search(text)
    if match is None:
        return None
    what = match["what"].strip()
    return _GRAPHS.get(what, what), match["end"] == "end"


def find_access(text: str) -> Access | None:
    """A line of the access log."""
    match = _ACCESS.search(text) if ' - "' in text else None
    return None if match is None else Access(match[1], match[2], match[3].partition("?")[0], int(match[4]))


def graph_timings(text: str) -> dict[str, float] | None:
    """Seconds that each capture took, from the summary that newer releases write; a graph that is off took 0."""
    if "Engine startup timings" not in text or "cuda_graph={" not in text:
        return None
    inside = text.partition("cuda_graph={")[2].partition("}")[0]
    names = {"target_verify": "verify", "draft_decode": "draft"}
    return {names.get(name, name): float(seconds) for name, seconds in _TIMING.findall(inside)}


def argument(server_args: str, name: str) -> str | None:
    """A field of the `server_args=` line, as text, in old (`name=value`) and new (`'name': value`) releases."""
    match = re.search(rf"(?:'{name}': |\b{name}=)('[^']*'|[^,)}}]+)", server_args)
    return None if match is None else match[1].strip().strip("'")


def _seconds(clock: str) -> float | None:
    """`1:02:03` or `02:03`; `?` is unknown."""
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total)

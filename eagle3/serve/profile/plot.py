"""A profile as a picture: every cycle as a stacked bar. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from eagle3.errors import problem_error
from eagle3.files import write_atomic
from eagle3.serve.profile.phases import PARTS
from eagle3.serve.profile.report import PART_WORDS
from eagle3.serve.profile.result import Profile

KINDS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """
    Raises:
        ProblemsError: kind `profile.plot`: matplotlib is not installed, or the name does not say a kind it writes.
    """
    if path.suffix.lower() not in KINDS:
        message = f"the kind of picture {path.suffix!r} is not known"
        raise problem_error(str(path), "profile.plot", message, f"name it {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fix = "pip install 'eagle3[plot]', or leave out --plot"
        raise problem_error(str(path), "profile.plot", "matplotlib is not installed", fix) from None


def plot_profile(profile: Profile, path: Path) -> None:
    """Writes the picture: one bar a cycle, in order, and the mean at the right.

    Raises:
        ProblemsError: as `check_picture`.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    split = profile.split
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    every, average = figure.subplots(1, 2, width_ratios=(6, 1), sharey=True)
    below, mean_below = [0.0] * len(split.cycles), 0.0
    for part in PARTS:
        heights = [cycle.parts.get(part, 0.0) / 1000 for cycle in split.cycles]
        if not any(heights):
            continue
        every.bar(range(len(heights)), heights, 1.0, bottom=below, label=PART_WORDS[part])
        average.bar([0], [split.parts[part].mean], 0.8, bottom=[mean_below])
        below = [base + height for base, height in zip(below, heights, strict=True)]
        mean_below += split.parts[part].mean
    every.set_xlabel("decode cycle")
    every.set_ylabel(f"ms of {'GPU' if split.on_gpu else 'CPU'} time")
    average.set_xticks([0], ["mean"])
    every.legend(fontsize="small")
    kind = path.suffix.lower().removeprefix(".")
    write_atomic(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=150))

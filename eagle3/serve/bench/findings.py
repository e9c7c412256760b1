"""What is wrong with a row, and what a reader should know of it."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.errors import Problem
from eagle3.serve.bench.rows import Row

ENOUGH = 20
"""Verifies without an accepted draft that call a server broken; fewer say nothing."""
HARDLY = 1.1
"""An acceptance length that wrong wiring gives as well."""
UNLIKE = 0.02
"""Relative difference of the answers' lengths that is worth a note."""
DRIFT = 0.1
"""Relative difference of a row's passes that is worth a note."""
FEW_FULL = 0.5
_CHECK = "check its wiring: `eagle3 wiring check` on the checkpoint, `eagle3 wiring probe --server` on the server"


def broken(row: Row) -> bool:
    """It verifies and accepts nothing: no slow server, but one whose drafter does not work (FAULTS 23)."""
    found = row.acceptance or row.counted
    return found is not None and found.verifies >= ENOUGH and found.committed <= found.verifies and _no_draft(row)


def _no_draft(row: Row) -> bool:
    return row.acceptance is None or not row.acceptance.histogram or not any(row.acceptance.histogram[1:])


def problems_of(row: Row) -> list[Problem]:
    """Whatever makes the row's figures no answer to what was asked."""
    where = f"{row.url}, concurrency {row.concurrency}"
    found = []

    def add(kind: str, message: str, fix: str) -> None:
        found.append(Problem(where, f"bench.{kind}", message, fix))

    if row.lost:
        done = f"; {row.passes} of {row.wanted} passes are measured" if row.passes else ""
        add("lost", f"{row.lost}{done}", "see the server's log, start it, and run the same command again")
    if row.failures:
        first = "; ".join(f"{item.talk}, turn {item.turn}: {item.reason}" for item in row.failures[:3])
        message = f"{len(row.failures)} of {row.requests + len(row.failures)} requests failed, the first: {first}"
        add("failed", message, "see the server's log; run the same command again for another try")
    if broken(row):
        verifies = (row.acceptance or row.counted).verifies  # type: ignore[union-attr]
        message = f"is broken, not slow: {verifies:,} verifies accepted no draft at all"
        add("broken", message, f"{_CHECK}; a head or a d2t table that the server did not load looks like this")
    if row.facts.speculates and row.requests and row.acceptance is None and row.counted is None:
        message = "speculates, but says nothing of acceptance: no data, neither 0 nor 1"
        add("no_acceptance", message, "ask SGLang's own route (api=sglang), or start it with --enable-metrics")
    if row.senseless:
        message = f"{len(row.senseless)} requests have figures that cannot be, the first: {row.senseless[0]}"
        add("meta_info", message, "report this with the server's version and its arguments")
    if row.foreign:
        message = f"answered {row.foreign} requests that were not ours while it was measured"
        add("traffic", message, "keep others away, and run the same command again: these passes are measured anew")
    return found


def notes_of(row: Row) -> list[str]:
    """What is no fault, but should be known."""
    notes = []
    found = row.acceptance or row.counted
    if found is not None and not broken(row) and found.length.value < HARDLY:
        notes.append(f"acceptance length {found.length.value:.3f}: hardly anything is accepted; {_CHECK}")
    if row.acceptance is None and row.counted is not None:
        notes.append("acceptance is from the server's counters, of all its traffic: requests do not say theirs")
    if row.silent and row.acceptance is not None:
        notes.append(f"{row.silent} requests do not say what was accepted; acceptance is that of the others")
    if row.acceptance is not None and row.acceptance.unsure:
        notes.append(
            f"the last rounds of {row.acceptance.unsure} answers may be cut elsewhere than taken (by depth only): "
            "the server put several rounds into one piece"
        )
    if row.flushed is False:
        notes.append("the prefix cache could not be emptied: later passes may prefill less")
    if row.speed is not None:
        if row.speed.full_share < FEW_FULL:
            notes.append(
                f"all {row.concurrency} conversations were busy for {row.speed.full_share:.0%} of the time only, which "
                "is what counts: give more prompts"
            )
        low, high = min(row.speed.by_pass), max(row.speed.by_pass)
        if high > low * (1 + DRIFT):
            notes.append(f"its passes differ: {low:.1f} to {high:.1f} tokens/s; was the machine in use?")
    most = row.facts.most_running
    if most is not None and most < row.concurrency:
        notes.append(f"the server decodes {most} requests at a time, so that {row.concurrency - most} always wait")
    if row.facts.cuda_graphs is False:
        notes.append("CUDA graphs are off")
    if row.shortened:
        notes.append(f"{row.shortened} answers had a shorter limit, since the context ends")
    if row.instances > 1:
        notes.append(f"its passes are of {row.instances} starts of the server")
    if row.shorter is not None and abs(row.shorter - 1) > UNLIKE:
        notes.append(f"its answers are {row.shorter:.1%} as long as the baseline's: the two do not do the same work")
    for name, item in row.against.items():
        if item.different:
            whose = "the target's own" if name == "reference" else "the baseline's"
            notes.append(
                f"{item.different} of {item.compared} answers are not {whose}, e.g. {item.first[0]}; in 16 bits "
                "near ties may fall either way, but most should be equal"
            )
        elif name == "reference" and not item.compared:
            notes.append("none of its prompts is in the reference")
    return notes


def left_out_notes(left_out: dict[str, dict[str, int]]) -> list[str]:
    """Prompts that were not sent."""
    return [
        f"{name}: left out {', '.join(f'{count:,} {reason}' for reason, count in sorted(reasons.items()))}"
        for name, reasons in left_out.items()
    ]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Of one concurrency, the fastest first; broken and lost ones are not ranked."""
    sound = [row for row in rows if row.speed is not None and not row.lost and not broken(row)]
    return sorted(sound, key=lambda row: -row.speed.tok_s.value if row.speed else 0.0)

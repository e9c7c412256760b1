"""What settings change: trains a drafter for each setting and seed on one dataset, and prints a table.

    python benchmarks/ablation.py benchmarks/ablation.yaml OUT dataset=datasets/smollm2-135m/states

A part of the dataset's samples, the same for all runs, is held out and never trained on (OUT/split); runs are compared
by the acceptance length there at the end of training. What is finished is not done again: the same command goes on
where it stopped, and with `--only` several of them may share OUT, one a GPU, once there is a split. The table has, over
seeds, mean and standard deviation, and those of the difference to the first setting with the same seed. A run that
fails, say because its loss is not finite, is named in the table, and the exit code is 2 then.

The file: `config`, a config of `eagle3 train`; `common`, overrides for all runs; `held_out`, a share; `seeds`;
`settings`, by name a list of overrides each, the first one to compare with. Overrides on the command line are for all
runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from eagle3.config import Section, TrainConfig, load_config
from eagle3.data.store_format import MANIFEST_FILE
from eagle3.data.store_split import split_fraction
from eagle3.errors import EXIT_PROBLEMS, EXIT_STOPPED, Problem, ProblemsError, raise_problems
from eagle3.files import write_text_atomic
from eagle3.train.checkpoint import list_checkpoints, load_state
from eagle3.train.run_folder import CONFIG_FILE
from eagle3.train.tracking import LOG_FILE, Record, read_log
from eagle3.train.trainer import run_training

_DEPTHS = 3


class Ablation(Section):
    """The file."""

    config: str
    """Of `eagle3 train`."""
    common: list[str] = Field(default_factory=list)
    """Overrides of all runs."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the samples that no run trains on."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """One run each."""
    settings: Annotated[dict[str, list[str]], Field(min_length=1)]
    """Overrides by setting."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path, help="folder for the split, the runs and table.md")
    parser.add_argument("overrides", nargs="*", help="key=value, of all runs")
    parser.add_argument("--only", nargs="+", default=[], help="settings to train; the table has all")
    args = parser.parse_intermixed_args()
    try:
        failed = run(args.file, args.out, args.overrides, args.only)
    except ProblemsError as error:
        raise SystemExit(_said(error)) from None
    if failed:
        raise SystemExit(EXIT_PROBLEMS)


def run(file: Path, out: Path, overrides: Sequence[str], only: Sequence[str]) -> bool:
    """Trains what is lacking and prints the table; whether a run failed.

    Raises:
        ProblemsError: of any config, before anything is trained.
    """
    ablation = load_config(Ablation, file)
    configs = make_configs(ablation, out, overrides)
    unknown = [Problem("--only", "ablation.setting", f"there is no {name}", f"use {', '.join(ablation.settings)}")
               for name in only if name not in ablation.settings]  # fmt: skip
    raise_problems(unknown)
    dataset = load_config(TrainConfig, ablation.config, [*ablation.common, *overrides]).dataset
    if not all((out / "split" / part / MANIFEST_FILE).exists() for part in ("part-00000", "part-00001")):
        split_fraction(dataset, out / "split", ablation.held_out, link=True)
    failures: dict[tuple[str, int], str] = {}
    for (name, seed), config in configs.items():
        if only and name not in only:
            continue
        if _is_done(config):
            continue
        print(f"== {name}, seed {seed}", file=sys.stderr)
        try:
            if run_training(config).stopped:
                raise SystemExit(EXIT_STOPPED)
        except ProblemsError as error:
            failures[name, seed] = error.problems[0].kind
            print(error, file=sys.stderr)
    table = render(ablation, {key: read(Path(config.output)) for key, config in configs.items()}, failures)
    write_text_atomic(out / "table.md", table + "\n")
    print(table)
    return bool(failures)


def make_configs(ablation: Ablation, out: Path, overrides: Sequence[str]) -> dict[tuple[str, int], TrainConfig]:
    """The config of each run, all of them valid."""
    configs, problems = {}, []
    parts = [f"dataset={out}/split/part-00001", f"eval_dataset={out}/split/part-00000"]
    for name, settings in ablation.settings.items():
        for seed in ablation.seeds:
            own = [f"seed={seed}", f"output={out}/runs/{name}-seed{seed}"]
            try:
                given = [*ablation.common, *overrides, *settings, *parts, *own]
                configs[name, seed] = load_config(TrainConfig, ablation.config, given)
            except ProblemsError as error:
                problems += [Problem(f"setting {name}: {found.where}", found.kind, found.message, found.fix)
                             for found in error.problems if seed == ablation.seeds[0]]  # fmt: skip
    raise_problems(problems)
    return configs


def read(run: Path) -> list[Record] | None:
    """The log of a run that took its last step; None of another."""
    checkpoints, log = list_checkpoints(run), read_log(run / LOG_FILE)
    evaluations = [record for record in log if record["kind"] == "eval"]
    if not checkpoints or not evaluations or not (run / "best.json").exists():
        return None
    if any(record["kind"] == "stop" for record in log) or load_state(checkpoints[-1]).step != evaluations[-1]["step"]:
        return None
    return log


def _is_done(config: TrainConfig) -> bool:
    """Whether this very run has taken its last step."""
    path = Path(config.output) / CONFIG_FILE
    return path.exists() and load_config(TrainConfig, path) == config and read(path.parent) is not None


def render(
    ablation: Ablation, logs: dict[tuple[str, int], list[Record] | None], failures: dict[tuple[str, int], str]
) -> str:
    """The table as Markdown."""
    first = next(iter(ablation.settings))
    lines = [
        f"| setting | seeds | acceptance length | against {first} | best of a run | "
        + " | ".join(f"draft {depth}" for depth in range(1, _DEPTHS + 1)) + " | seconds |",
        "|" + "---|" * (6 + _DEPTHS),
    ]  # fmt: skip
    for name, settings in ablation.settings.items():
        found = {seed: log for seed in ablation.seeds if (log := logs[name, seed]) is not None}
        ends = {seed: _ends(log) for seed, log in found.items()}
        lengths = {seed: _length(end) for seed, end in ends.items()}
        base = {seed: log for seed in lengths if (log := logs[first, seed]) is not None}
        gains = [lengths[seed] - _length(_ends(log)) for seed, log in base.items()]
        best = [max(map(_length, _evaluations(log)[1:])) for log in found.values()]
        depths = [[end["acceptance_by_depth"][k] for end in ends.values()] for k in range(_DEPTHS)
                  if all(len(end["acceptance_by_depth"]) > k for end in ends.values())]  # fmt: skip
        seconds = [sum(record["seconds"] for record in log if record["kind"] == "train") for log in found.values()]
        lacking = [f"seed {seed}: {failures.get((name, seed), 'not finished')}"
                   for seed in ablation.seeds if seed not in found]  # fmt: skip
        shown = [_spread(list(lengths.values())), "" if name == first else _spread(gains, "+"), _spread(best)]
        shown += [_share([value for value in values if value is not None]) for values in depths]
        shown += [""] * (3 + _DEPTHS - len(shown)) + [f"{statistics.mean(seconds):.0f}" if seconds else ""]
        seeds = ", ".join([str(len(found)), *lacking])
        lines.append(f"| {name} ({' '.join(settings) or 'as the config'}) | {seeds} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _evaluations(log: list[Record]) -> list[Record]:
    return [record for record in log if record["kind"] == "eval"]


def _length(evaluation: Record) -> float:
    """NaN where no held-out answer has a round."""
    found = evaluation["acceptance_length"]
    return math.nan if found is None else float(found)


def _ends(log: list[Record]) -> Record:
    return _evaluations(log)[-1]


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{deviation}"


def _share(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1%}" if values else ""


def _said(error: ProblemsError) -> int:
    print(error, file=sys.stderr)
    return EXIT_PROBLEMS


if __name__ == "__main__":
    main()

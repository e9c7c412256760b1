"""A run's folder: what it holds besides checkpoints and log, and whether a new start may go on with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.config import (
    CacheSection,
    EarlyStoppingSection,
    Section,
    TrackingSection,
    TrainConfig,
    dump_config,
    load_config,
)
from eagle3.data.tensor_file import save_tensors
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import (
    TEMPORARY_SUFFIX,
    explained_os_errors,
    read_json_object,
    write_atomic,
    write_json_atomic,
    write_text_atomic,
)
from eagle3.train.checkpoint import TrainState, list_checkpoints, load_state
from eagle3.train.samples import order_of
from eagle3.train.setup import Setup
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract

CONFIG_FILE = "config.yaml"
DRAFT_CONFIG_FILE = "draft_config.json"
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
TARGET_CONFIG_FILE = "target_config.json"
PROVENANCE_FILE = "provenance.json"
BEST_FILE = "best.json"
LOCK_FILE = "writer.lock"

_MAY_CHANGE = {
    "dataset",
    "eval_dataset",
    "output",
    "keep_checkpoints",
    "cache",
    *(f"cache.{name}" for name in CacheSection.model_fields),
    "early_stopping",
    *(f"early_stopping.{name}" for name in EarlyStoppingSection.model_fields),
    "ring.wait_seconds",
    "ring.rewind",
    *(f"tracking.{name}" for name in TrackingSection.model_fields),
}
"""Config keys that a resumed run may change: a dataset is recognised by its content, wherever it lies."""

_DIVISION = {"batch_size", "accumulate"}
"""Keys that divide a step's rows among micro-batches; they and the number of processes may change together."""


def find_resume_point(run: Path, config: TrainConfig, setup: Setup, processes: int) -> Path | None:
    """The checkpoint to go on from; None for a folder that is new or has none yet. Writes nothing.

    Raises:
        ProblemsError: the folder is something else, or another run (every difference is listed), or its newest
            checkpoint is damaged.
    """
    if run.exists() and not run.is_dir():
        raise problem_error(str(run), "run.not_a_run", "is a file, expected a folder", "choose another output folder")
    if not run.exists() or all(path.name.endswith((TEMPORARY_SUFFIX, LOCK_FILE)) for path in run.iterdir()):
        return None
    if not (run / CONFIG_FILE).exists():
        message = f"is not empty and has no {CONFIG_FILE}: not a run"
        raise problem_error(str(run), "run.not_a_run", message, "choose another output folder")
    stored, checkpoints = load_config(TrainConfig, run / CONFIG_FILE), list_checkpoints(run)
    state = load_state(checkpoints[-1]) if checkpoints else None
    same_steps = state is None or _same_steps(stored, state.processes, config, processes)
    divisible = state is not None and same_steps and stored.ring is None
    problems = _config_differences(stored, config, run, _DIVISION if divisible else set())
    if (run / CONTRACT_FILE).exists():
        problems += WiringContract.load(run).compare(setup.contract, f"run {run}", "this start")
    if state is not None:
        problems += _state_differences(state, setup, processes, same_steps, run)
        problems += _other_order(state, stored, run)
    raise_problems(problems, f"cannot resume {run}")
    return checkpoints[-1] if checkpoints else None


def read_origin(run: Path) -> dict[str, Any]:
    """The provenance of a run that is resumed: `run_id` and earlier `starts`.

    Raises:
        ProblemsError: kinds `run.provenance`, `file.*`.
    """
    path = run / PROVENANCE_FILE
    origin = read_json_object(path, "the run's provenance")
    if not isinstance(origin.get("run_id"), str) or not isinstance(origin.get("starts"), list):
        fix = "restore the file from a copy, or use another output folder"
        raise problem_error(str(path), "run.provenance", "lacks run_id or the list of starts", fix)
    return origin


def write_run_files(run: Path, config: TrainConfig, setup: Setup, provenance: dict[str, Any]) -> None:
    """Writes all but log and checkpoints; the same bytes on a resume, but for provenance and what may change."""
    with explained_os_errors(run):
        run.mkdir(parents=True, exist_ok=True)
    write_text_atomic(run / CONFIG_FILE, dump_config(config))
    setup.contract.save(run / CONTRACT_FILE)
    if (fingerprint := setup.samples.train.reader.fingerprint) is not None:
        fingerprint.save(run)
    write_json_atomic(run / DRAFT_CONFIG_FILE, setup.module.model.config.to_dict())
    write_json_atomic(run / TARGET_CONFIG_FILE, setup.samples.train.reader.target_config)
    tables = {"d2t": setup.vocab.d2t, "t2d": setup.vocab.t2d}
    write_atomic(run / DRAFT_VOCAB_FILE, lambda path: save_tensors(tables, path))
    write_json_atomic(run / PROVENANCE_FILE, provenance)


def point_at_best(run: Path, state: TrainState) -> None:
    """Has `best.json` name the best checkpoint so far, which is in place."""
    if state.best is not None:
        write_json_atomic(run / BEST_FILE, asdict(state.best))


def _same_steps(stored: TrainConfig, before: int, given: TrainConfig, now: int) -> bool:
    """Whether each step has the same samples: its rows depend on this product only (`eagle3.data.batch_plan`)."""
    if stored.ring is not None:
        return before == now
    rows = [config.batch_size * config.accumulate * count for config, count in ((stored, before), (given, now))]
    return rows[0] == rows[1]


def _config_differences(stored: TrainConfig, given: TrainConfig, run: Path, free: set[str]) -> list[Problem]:
    """Args:
    free: keys that may change besides `_MAY_CHANGE`.
    """
    mine, theirs = _flat(stored), _flat(given)
    used = stored.model_dump().keys() & given.model_dump().keys()  # without what `batch_tokens` replaces
    fix = "use the config of that run, or another output folder"
    return [
        Problem(
            str(run / CONFIG_FILE),
            "run.other_config",
            f"{key} is {_shown(mine.get(key))} there, {_shown(theirs.get(key))} now",
            fix,
        )
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key) and key not in _MAY_CHANGE | free and key.partition(".")[0] in used
    ]


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def _state_differences(state: TrainState, setup: Setup, processes: int, same_steps: bool, run: Path) -> list[Problem]:
    problems = []
    if not same_steps and state.processes != processes:
        message = (
            f"was trained by {state.processes} processes, this start has {processes}: its steps would have other rows"
        )
        fix = (
            f"start {state.processes} processes, or change batch_size or accumulate so that batch_size x accumulate x "
            "processes stays the same (not in a ring), or use another output folder"
        )
        problems.append(Problem(str(run), "run.other_processes", message, fix))
    if state.data_digest != setup.samples.digest:
        message = "the dataset or eval_dataset holds other samples than when the run began"
        problems.append(Problem(str(run), "run.other_data", message, "restore it, or use another output folder"))
    return problems


def _other_order(state: TrainState, stored: TrainConfig, run: Path) -> list[Problem]:
    """A release that packs rows otherwise would give some samples of this epoch twice and others never."""
    if state.order == order_of(stored):
        return []
    message = (
        f"its samples come in order {state.order}, which another release of eagle3 made; this one makes order "
        f"{order_of(stored)}, whose packed rows hold other samples, so some would be seen twice and others never"
    )
    fix = "go on with the release that began the run (provenance.json names it), or use another output folder"
    return [Problem(str(run), "run.other_order", message, fix)]


def _flat(section: Section, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a config by dotted key; a section that is not given is one leaf."""
    flat: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat

"""Points and baselines out of what `eagle3 serve bench` and `eagle3 serve sweep` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from eagle3.config import PlanConfig, build_config
from eagle3.errors import problem_error
from eagle3.files import read_json_object

FORMATS = ("eagle3-bench", "eagle3-sweep")


def with_measured(config: PlanConfig) -> PlanConfig:
    """The config with what its `bench_files` measured.

    Raises:
        ProblemsError: kind `plan.bench_file`: a file is not one, has no row that can be used, or two files have a
            baseline of the same batch.
    """
    if not config.bench_files:
        return config
    values = config.model_dump(exclude_unset=True)
    values["points"] = [*values.get("points", [])]
    values["baseline"] = [*values.get("baseline", [])]
    owners = {point.batch: "baseline" for point in config.baseline}
    for name in config.bench_files:
        points, baselines = _read(Path(name))
        values["points"] += points
        for found in baselines:
            owner = owners.setdefault(found["batch"], name)
            if owner != name:
                message = f"has a baseline at batch {found['batch']}, which {owner} has too"
                raise problem_error(name, "plan.bench_file", message, "leave one of the two out")
            values["baseline"].append(found)
    if "batches" not in config.model_fields_set:
        values["batches"] = sorted(
            {point["batch"] for point in values["points"]} | {item["batch"] for item in values["baseline"]}
        )
    values["bench_files"] = []
    return build_config(PlanConfig, values, ", ".join(config.bench_files))


def _read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    value = read_json_object(path, "result of a bench")
    fix = "pass the bench.json or sweep.json that `eagle3 serve bench` or `eagle3 serve sweep` wrote"
    if value.get("format") not in FORMATS or value.get("format_version") != 1:
        message = f"is no bench: format {value.get('format')!r}, version {value.get('format_version')!r}"
        raise problem_error(str(path), "plan.bench_file", message, fix)
    points, baselines = value.get("points"), value.get("baseline")
    if not _are_points(points) or not _are_points(baselines):
        raise problem_error(str(path), "plan.bench_file", "has no points, or others than it should", fix)
    if not points and not baselines:
        message = "has no row of a server that worked: no point, no baseline"
        raise problem_error(str(path), "plan.bench_file", message, "see the problems in it, and measure again")
    return points, baselines


def _are_points(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Whether each has a batch; their other keys are checked with the config's own points."""
    return isinstance(value, list) and all(isinstance(item, dict) and type(item.get("batch")) is int for item in value)

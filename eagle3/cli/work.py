"""The work itself: from prompts to a served drafter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagle3.cli.common import Cache, CacheBytes, ConfigFile, Overrides, cache_section, epilog, run_config
from eagle3.config import (
    ExtractConfig,
    RegenerateConfig,
    RingReadSection,
    RingWriteSection,
    ServeConfig,
    TrainConfig,
)
from eagle3.errors import EXIT_PROBLEMS, EXIT_STOPPED, problem_error

work_app = typer.Typer()

StoreType = Literal["bf16", "fp8", "fp16", "fp32"]
_STORE_TYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp16": "float16", "fp32": "float32"}


@work_app.command(epilog=epilog(RegenerateConfig))
def regenerate(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Answers to prompts from the target itself."""
    from eagle3.target.regenerate import run_regenerate

    print(run_regenerate(run_config(RegenerateConfig, config, overrides)).render())


@work_app.command(epilog=epilog(ExtractConfig))
def extract(
    config: ConfigFile = None,
    overrides: Overrides = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Extract another store's samples once more instead of `data`.")
    ] = None,
    dtype: Annotated[
        StoreType | None, typer.Option(help="Type of the stored states, for `store_dtype`; see docs/stores.md.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what it would read, write and take, and stop.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Into a ring that `train --stream` consumes (docs/ring.md).")
    ] = False,
) -> None:
    """The target's hidden states for conversations, as a store.

    Streamed, several processes share the work (docs/extraction.md).
    """
    chosen = [] if source is None else [f"from_store={json.dumps(source)}"]
    chosen += [] if dtype is None else [f"store_dtype={_STORE_TYPES[dtype]}"]
    cfg = run_config(ExtractConfig, config, [*(overrides or []), *chosen])
    if stream and cfg.ring is None:
        cfg = cfg.model_copy(update={"ring": RingWriteSection()})
    if dry:
        from eagle3.target.estimate import dry_run

        plan = dry_run(cfg)
        print(plan.render())
        raise typer.Exit(EXIT_PROBLEMS if plan.problems else 0)
    from eagle3.target.extract import run_extract, run_extract_ring

    print((run_extract(cfg) if cfg.ring is None else run_extract_ring(cfg)).render())


@work_app.command(epilog=epilog(TrainConfig))
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="From a ring that `extract --stream` fills (docs/ring.md).")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what device memory this takes, and the most tokens that fit, and stop.")
    ] = False,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="With --plan: a card's memory; default: the first GPU's.")
    ] = None,
) -> None:
    """Fits a drafter on a hidden-state store.

    With several processes: accelerate launch train.py (docs/training.md). SIGTERM, SIGINT or SIGUSR1 stops it after a
    step, saved, with exit code 75; the same command goes on.
    """
    cfg = run_config(TrainConfig, config, overrides)
    if stream and cfg.ring is None:
        cfg = cfg.model_copy(update={"ring": RingReadSection()})
    if plan:
        from eagle3.train.plan import plan_memory

        found = plan_memory(cfg, device_memory)
        if os.environ.get("RANK", "0") == "0":
            print(found.render())
        raise typer.Exit(EXIT_PROBLEMS if found.problems else 0)
    if device_memory is not None:
        raise problem_error("--device-memory", "plan.device", "is given without --plan", "pass --plan too, or neither")
    from eagle3.train.trainer import run_training

    result = run_training(cfg)
    if result.is_main_process:
        print(result.render())
    if result.stopped:
        raise typer.Exit(EXIT_STOPPED)


@work_app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="Run folder or exported checkpoint.")],
    dataset: Annotated[
        str, typer.Option(help="Held-out hidden-state store (folder or URL) with the target's own answers.")
    ],
    steps: Annotated[int, typer.Option(min=1, max=64, help="Draft steps a round.")] = 3,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
) -> None:
    """Acceptance that greedy serving would reach, from stored hidden states."""
    from eagle3.evaluate.checkpoint import evaluate_checkpoint

    print(evaluate_checkpoint(checkpoint, dataset, steps, cache_section(cache, cache_max_bytes)).render())


@work_app.command(epilog=epilog(ServeConfig))
def export(
    config: ConfigFile = None,
    run: Annotated[str | None, typer.Option(help="Run folder to export from.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the exported checkpoint.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Version of the engine that will serve it.")] = None,
    overrides: Overrides = None,
) -> None:
    """A run's checkpoint as the folder that a serving engine loads."""
    from eagle3.serve.export import export_run

    given = {"run": run, "output": output, "engine_version": engine_version}
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    print(export_run(run_config(ServeConfig, config, [*options, *(overrides or [])])).render())


@work_app.command()
def demo(
    output: Annotated[Path | None, typer.Option(help="Folder to write into; default: one for each target.")] = None,
    target: Annotated[str | None, typer.Option(help="Another target: checkpoint folder or hub id.")] = None,
) -> None:
    """The main job on a small real model, start to end."""
    from eagle3.demo.run import run_demo

    run_demo(output, target)


@work_app.command("tiny-kimi")
def tiny_kimi(
    output: Annotated[Path, typer.Option(help="Folder for target/ and prompts.jsonl.")] = Path("datasets/tiny-kimi"),
) -> None:
    """A random Kimi-K2.5 of the real depth in 20 MB, to try configs/tiny-kimi with."""
    from eagle3.demo.tiny import make_tiny_kimi_folder

    print(make_tiny_kimi_folder(output))

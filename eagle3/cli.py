"""The `eagle3` command. Thin: each command reads its config, calls one function and prints what came back.

Exit codes: 0 done, 2 the input has problems (all of them are printed), 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from eagle3 import __version__
from eagle3.config import (
    ExtractConfig,
    RegenerateConfig,
    Section,
    ServeConfig,
    TrainConfig,
    field_help,
    load_config,
)
from eagle3.errors import EXIT_PROBLEMS, Eagle3Error, Problem, ProblemsError, problem_error

EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Train EAGLE-3 drafters whose layer wiring is checked from capture to server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
wiring_app = typer.Typer(help="Which layers a drafter is fed, by engine and version.", no_args_is_help=True)
data_app = typer.Typer(help="Hidden-state stores.", no_args_is_help=True)
app.add_typer(wiring_app, name="wiring")
app.add_typer(data_app, name="data")

ProbeEngine = Literal["auto", "transformers", "streamed"]
ConfigT = TypeVar("ConfigT", bound=Section)
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML config, e.g. one of configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, see below.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
EngineVersion = Annotated[str | None, typer.Option(help="The engine's version; default: as recorded, else the newest.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Files read at a time; default: one a core, 8 at most.")]
Resume = Annotated[Path | None, typer.Option(help="Remember in this file what was found whole, and go on from it.")]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names that a terminal cannot show are no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if args is None else list(args), prog_name="eagle3")
    except SystemExit as stop:
        if stop.code == EXIT_INTERRUPTED:
            print("eagle3: stopped; the same command goes on where it was", file=sys.stderr)
        raise
    except Eagle3Error as error:
        print(f"eagle3: {error}", file=sys.stderr)
        sys.exit(EXIT_PROBLEMS)
    except OSError as error:  # what no command expects: a name that is too long, a folder in place of a file ...
        problem = Problem(str(error.filename or "disk"), "disk.error", error.strerror or str(error), "check this path")
        print(f"eagle3: {problem}", file=sys.stderr)
        sys.exit(EXIT_PROBLEMS)


@contextmanager
def _problems_as(as_json: bool) -> Iterator[None]:
    """With `--json`, problems that end a command are its report, on stdout; see docs/schemas/problems.schema.json."""
    try:
        yield
    except ProblemsError as error:
        if not as_json:
            raise
        from eagle3.wiring.report import render_json

        print(render_json(error.problems))
        raise typer.Exit(EXIT_PROBLEMS) from None


def _epilog(model: type[Section]) -> str:
    """The config's fields as help text: one source with the config itself."""
    lines = [f"{key} [{default}]: {text}" for key, default, text in field_help(model)]
    return "\b\nConfig keys, with their defaults:\n" + "\n".join(lines)


def _config(model: type[ConfigT], path: Path | None, overrides: list[str] | None) -> ConfigT:
    return load_config(model, path, overrides or [])


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


@app.command(epilog=_epilog(RegenerateConfig))
def regenerate(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Answers to prompts from the target itself."""
    from eagle3.target.regenerate import run_regenerate

    print(run_regenerate(_config(RegenerateConfig, config, overrides)).render())


@app.command(epilog=_epilog(ExtractConfig))
def extract(
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what it would read, write and take, and stop.")] = False,
) -> None:
    """The target's hidden states for conversations, as a store.

    Streamed, several processes share the work (docs/extraction.md).
    """
    cfg = _config(ExtractConfig, config, overrides)
    if dry:
        from eagle3.target.estimate import dry_run

        plan = dry_run(cfg)
        print(plan.render())
        raise typer.Exit(EXIT_PROBLEMS if plan.problems else 0)
    from eagle3.target.extract import run_extract

    print(run_extract(cfg).render())


@app.command(epilog=_epilog(TrainConfig))
def train(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Fits a drafter on a hidden-state store.

    With several processes: accelerate launch train.py (docs/training.md).
    """
    from eagle3.train.trainer import run_training

    result = run_training(_config(TrainConfig, config, overrides))
    if result.is_main_process:
        print(result.render())


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="Run folder or exported checkpoint.")],
    dataset: Annotated[Path, typer.Option(help="Held-out hidden-state store with the target's own answers.")],
    steps: Annotated[int, typer.Option(min=1, help="Draft steps a round.")] = 3,
) -> None:
    """Acceptance that greedy serving would reach, from stored hidden states."""
    from eagle3.evaluate.checkpoint import evaluate_checkpoint

    print(evaluate_checkpoint(checkpoint, dataset, steps).render())


@app.command(epilog=_epilog(ServeConfig))
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
    print(export_run(_config(ServeConfig, config, [*options, *(overrides or [])])).render())


@app.command()
def demo(
    output: Annotated[Path | None, typer.Option(help="Folder to write into; default: one for each target.")] = None,
    target: Annotated[str | None, typer.Option(help="Another target: checkpoint folder or hub id.")] = None,
) -> None:
    """The main job on a small real model, start to end."""
    from eagle3.demo.run import run_demo

    run_demo(output, target)


@app.command("tiny-kimi")
def tiny_kimi(
    output: Annotated[Path, typer.Option(help="Folder for target/ and prompts.jsonl.")] = Path("datasets/tiny-kimi"),
) -> None:
    """A random Kimi-K2.5 of the real depth in 20 MB, to try configs/tiny-kimi with."""
    from eagle3.demo.tiny import make_tiny_kimi_folder

    print(make_tiny_kimi_folder(output))


@wiring_app.command("explain")
def wiring_explain(
    target: Annotated[str, typer.Option(help="Known target's name, checkpoint folder or config.json.")],
    layers: Annotated[str, typer.Option(help="Output indices, e.g. 2,30,58.")],
    sources: Annotated[bool, typer.Option("--sources", help="Also say where each rule was read, and when.")] = False,
    as_json: AsJson = False,
) -> None:
    """What each engine and version calls these layers."""
    from eagle3.wiring.report import explain, render_explain

    with _problems_as(as_json):
        print(render_explain(explain(target, layers), as_json=as_json, sources=sources))


@wiring_app.command("check")
def wiring_check(
    checkpoint: Annotated[Path, typer.Argument(help="Exported draft checkpoint.")],
    dataset: Annotated[Path | None, typer.Option(help="Hidden-state store it was trained on.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: known name, folder or config.json.")] = None,
    engine: Annotated[str, typer.Option(help="Serving engine: sglang or vllm.")] = "sglang",
    engine_version: EngineVersion = None,
    layers: Annotated[
        str | None, typer.Option(help="Output indices it was trained on, e.g. 2,30,58: for another tool's checkpoint.")
    ] = None,
    cuda_graphs: Annotated[bool, typer.Option(help="The server uses CUDA graphs (its default).")] = True,
    as_json: AsJson = False,
) -> None:
    """Every reason why a server would feed this drafter other layers; exit code 0 or 2."""
    from eagle3.wiring.checks import check_checkpoint, describe_checkpoint
    from eagle3.wiring.layers import parse_layers
    from eagle3.wiring.report import exit_code, render_json, render_text

    with _problems_as(as_json):
        problems = check_checkpoint(
            checkpoint,
            dataset=dataset,
            target=target,
            engine=engine,
            engine_version=engine_version,
            layers=parse_layers(layers) if layers is not None else None,
            cuda_graphs=cuda_graphs,
        )
    print((render_json if as_json else render_text)(problems))
    if not problems and not as_json:
        print(describe_checkpoint(checkpoint, engine, engine_version, target=target))
    raise typer.Exit(exit_code(problems))


@wiring_app.command("probe")
def wiring_probe(
    path: Annotated[Path, typer.Argument(help="Hidden-state store, run or exported checkpoint.")],
    target: Annotated[str | None, typer.Option(help="Target to compute again: checkpoint folder or hub id.")] = None,
    server: Annotated[str | None, typer.Option(help="Or: URL of a running SGLang that serves the drafter.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Stored samples to compute again, beside the fingerprint.")] = 4,
    engine: Annotated[
        ProbeEngine, typer.Option(help="How the target is run; auto streams what does not fit.")
    ] = "auto",
    skip_last: Annotated[
        bool, typer.Option("--skip-last", help="Leave the last hidden states and layers out.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, or auto.")] = "auto",
    api_key: Annotated[str | None, typer.Option(envvar="EAGLE3_API_KEY", help="API key of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """What each slot of a store, or of a running server, really holds; exit code 0 or 2."""
    from eagle3.wiring.report import exit_code

    with _problems_as(as_json):
        if (target is None) == (server is None):
            fix = "give one: the target, to check a store, or the server, to check how it feeds the drafter"
            raise problem_error("wiring probe", "probe.what", "needs either --target or --server", fix)
        if server is not None:
            from eagle3.serve.server_probe import probe_server

            report = probe_server(path, server, api_key=api_key)
        else:
            from eagle3.target.probe import probe_dataset

            assert target is not None
            report = probe_dataset(path, target, samples, engine, last=not skip_last, device=device)
    print(report.render(as_json))
    raise typer.Exit(exit_code(report.problems))


@data_app.command("verify")
def data_verify(
    folder: Annotated[Path, typer.Argument(help="Hidden-state store.")],
    deep: Annotated[bool, typer.Option("--deep/--quick", help="Read every byte, or sizes and headers only.")] = True,
    workers: Workers = None,
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Whether a store is whole; exit code 0 or 2."""
    from eagle3.data.store_verify import verify
    from eagle3.wiring.report import exit_code, render_json, render_text

    with _problems_as(as_json):
        problems = verify(folder, deep, workers=workers, resume=resume)
    print((render_json if as_json else render_text)(problems))
    raise typer.Exit(exit_code(problems))


@data_app.command("repair")
def data_repair(
    folder: Annotated[Path, typer.Argument(help="Hidden-state store.")],
    yes: Annotated[bool, typer.Option("--yes", help="Drop what is bad. Without it, nothing is changed.")] = False,
    list_file: Annotated[
        Path | None, typer.Option("--list", help="Write the samples to redo here, a line each.")
    ] = None,
    workers: Workers = None,
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Drops bad shards, so that `eagle3 extract` redoes them; exit code 0 or 2."""
    from eagle3.data.store_repair import repair
    from eagle3.wiring.report import exit_code

    with _problems_as(as_json):
        report = repair(folder, yes, workers, resume, list_file)
    print(report.render(as_json))
    raise typer.Exit(exit_code(report.open_problems))


if __name__ == "__main__":
    main()

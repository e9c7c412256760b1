"""`eagle3 serve launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagle3.cli.common import AsJson, ConfigFile, Overrides, epilog, problems_as, run_config
from eagle3.config import LaunchConfig
from eagle3.errors import problem_error

EPILOG = epilog(LaunchConfig)


def launch(
    config: ConfigFile = None,
    overrides: Overrides = None,
    engine: Annotated[Literal["sglang", "vllm"] | None, typer.Option(help="Config key engine.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Config key engine_version.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Config key checkpoint.")] = None,
    target: Annotated[str | None, typer.Option(help="Config key target.")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Start it, wait, and end it with Ctrl-C; else print only.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="With --run: file that gets the server's output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print (or run) the exact command of a server with a drafter, after `wiring check` (docs/serving.md).

    Whatever begins with a dash after a `--` goes to the server as it is.
    """
    from eagle3.serve.launch import build_command

    with problems_as(as_json):
        changes, extra = _split(overrides or [])
        given = {"engine": engine, "engine_version": engine_version, "checkpoint": checkpoint, "target": target}
        changes += [f"{key}={_quoted(value)}" for key, value in given.items() if value is not None]
        cfg = run_config(LaunchConfig, config, changes)
        command = build_command(cfg.model_copy(update={"extra_args": [*cfg.extra_args, *extra]}))
        if run and log is None:
            fix = "say where its output goes: --log FILE"
            raise problem_error("serve launch", "launch.log", "--run needs a file for the server's output", fix)
        if run and command.engine != "sglang":
            message = f"{command.engine} is not waited for: only SGLang's log and endpoints are known"
            raise problem_error("engine", "launch.unsupported", message, "print the command and run it yourself")
    # With both, what is ready is the one JSON document on stdout.
    print(command.render(as_json and not run), file=sys.stderr if as_json and run else sys.stdout, flush=True)
    if run:
        assert log is not None
        with problems_as(as_json):
            _run(command, log, as_json)


def _run(command: object, log: Path, as_json: bool) -> None:
    from eagle3.serve.launch import LaunchCommand, start_server
    from eagle3.serve.wait import wait_until_ready
    from eagle3.serve.wait.follow import until_it_ends
    from eagle3.serve.wait.show import shown_progress

    assert isinstance(command, LaunchCommand)
    with start_server(command, log) as server:
        with shown_progress() as show:
            ready = wait_until_ready(command.url, process=server, on_progress=show)
        print(ready.render(as_json), flush=True)
        print(f"{command.url} runs until Ctrl-C; its output is in {log}", file=sys.stderr)
        until_it_ends(server)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Overrides, and what is for the server: all from the first one on that begins with a dash."""
    first = next((number for number, item in enumerate(arguments) if item.startswith("-")), len(arguments))
    return arguments[:first], arguments[first:]


def _quoted(value: str) -> str:
    """As YAML text: a version such as 0.33 is no number."""
    return "'" + value.replace("'", "''") + "'"

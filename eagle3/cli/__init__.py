"""The `eagle3` command. Thin: each command reads its config, calls one function and prints what came back.

Exit codes: 0 done, 2 the input has problems (all of them are printed), 75 training was asked to stop and is saved, 130
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from eagle3 import __version__
from eagle3.cli.data import data_app
from eagle3.cli.decode import decode_app
from eagle3.cli.serve import serve_app
from eagle3.cli.vocab import vocab_app
from eagle3.cli.wiring import wiring_app
from eagle3.cli.work import work_app
from eagle3.errors import EXIT_PROBLEMS, Eagle3Error, Problem

EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Train EAGLE-3 drafters whose layer wiring is checked from capture to server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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
        _leave(EXIT_PROBLEMS)
    except OSError as error:  # what no command expects: a name that is too long, a folder in place of a file ...
        problem = Problem(str(error.filename or "disk"), "disk.error", error.strerror or str(error), "check this path")
        print(f"eagle3: {problem}", file=sys.stderr)
        _leave(EXIT_PROBLEMS)


def _leave(code: int) -> NoReturn:
    """Exits with this code. A process group that an error left open may make the interpreter abort as it ends, with
    another code, so there it is left as it is."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


app.add_typer(work_app)
app.add_typer(decode_app)
app.add_typer(wiring_app, name="wiring")
app.add_typer(vocab_app, name="vocab")
app.add_typer(data_app, name="data")
app.add_typer(serve_app, name="serve")

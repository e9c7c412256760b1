"""`eagle3 serve sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import AsJson, ConfigFile, Overrides, epilog, problems_as, run_config
from eagle3.config import SweepConfig

EPILOG = epilog(SweepConfig)


def sweep(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write besides (.png, .svg or .pdf); needs the extra `plot`.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the servers' commands, and start none.")] = False,
) -> None:
    """Start a server at every step count, measure each, and hold a plan against them (docs/sweep.md).

    A server that dies is a failed row with its cause, and the others go on; exit code 2 then. Stopped and started
    again, it goes on with the rows that are lacking.
    """
    from eagle3.serve.sweep.report import render_sweep, sweep_json
    from eagle3.serve.sweep.run import run_sweep
    from eagle3.serve.sweep.settings import make_settings

    with problems_as(as_json):
        cfg = run_config(SweepConfig, config, overrides)
        if dry_run:
            for setting in make_settings(cfg):
                print(f"# {setting.name}\n{setting.command}")
            return
        if plot is not None:
            from eagle3.serve.picture import new_figure

            new_figure(plot, "sweep.plot", 1, 1)  # before anything is measured
        result = run_sweep(cfg)
        if plot is not None:
            from eagle3.serve.sweep.plot import plot_sweep

            plot_sweep(result, plot)
    print(sweep_json(result) if as_json else render_sweep(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)

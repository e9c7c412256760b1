"""`eagle3 serve`: around a server, from before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli import serve_bench, serve_launch, serve_profile, serve_sweep, serve_wait
from eagle3.cli.common import AsJson, ConfigFile, Overrides, epilog, problems_as, run_config
from eagle3.config import PlanConfig

serve_app = typer.Typer(help="Around a server: what it will do, its command, its start.", no_args_is_help=True)
serve_app.command("launch", epilog=serve_launch.EPILOG)(serve_launch.launch)
serve_app.command("wait")(serve_wait.wait)
serve_app.command("profile")(serve_profile.profile)
serve_app.command("bench", epilog=serve_bench.EPILOG)(serve_bench.bench)
serve_app.command("sweep", epilog=serve_sweep.EPILOG)(serve_sweep.sweep)


@serve_app.callback()
def _root() -> None:
    """Around a server: what it will do, its command, its start."""


@serve_app.command(epilog=epilog(PlanConfig))
def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write besides (.png, .svg or .pdf); needs the extra `plot`.")
    ] = None,
) -> None:
    """Tokens/s at every number of draft steps, from what is known of the server (docs/serving-plan.md).

    Starts nothing and measures nothing.
    """
    from eagle3.serve.planner import make_plan, plan_json, render_plan

    with problems_as(as_json):
        cfg = run_config(PlanConfig, config, overrides)
        found = make_plan(cfg, "command line" if config is None else str(config))
        if plot is not None:
            from eagle3.serve.planner.plot import plot_plan

            plot_plan(found, plot)
    print(plan_json(found) if as_json else render_plan(found))

"""`eagle3 serve bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import AsJson, ConfigFile, Overrides, epilog, problems_as, run_config
from eagle3.config import BenchConfig

EPILOG = epilog(BenchConfig)


def bench(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write besides (.png, .svg or .pdf); needs the extra `plot`.")
    ] = None,
) -> None:
    """Speed and acceptance of running servers on real prompts, against one without a drafter (docs/bench.md).

    Exit code 2 if a server is lost or broken, a request failed, or others used it meanwhile. Stopped and started again,
    it goes on with the passes that are lacking.
    """
    from eagle3.serve.bench.report import bench_json, render_bench
    from eagle3.serve.bench.run import run_bench

    with problems_as(as_json):
        cfg = run_config(BenchConfig, config, overrides)
        if plot is not None:
            from eagle3.serve.picture import new_figure

            new_figure(plot, "bench.plot", 1, 1)  # before anything is measured
        result = run_bench(cfg)
        if plot is not None:
            from eagle3.serve.bench.plot import plot_bench

            plot_bench(result, plot)
    print(bench_json(result) if as_json else render_bench(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)

"""`eagle3 serve profile`: where a decode cycle's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import AsJson, problems_as
from eagle3.errors import Problem, raise_problems


def profile(
    server: Annotated[str | None, typer.Option(help="URL of a running SGLang that speculates; it gets traced.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="With --server: prompts to send, as docs/data.md says.")] = None,
    target: Annotated[
        str | None, typer.Option(help="With --server: target whose tokenizer renders the prompts; default: the server.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --server: folder that the server writes the traces to; they stay there.")
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="A trace that is there (.json, .json.gz); once for each rank.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    cycles: Annotated[int, typer.Option(min=1, help="Decode cycles to trace.")] = 50,
    requests: Annotated[int, typer.Option(min=1, help="Answers that are measured without the profiler.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 256,
    with_stack: Annotated[
        bool, typer.Option("--with-stack", help="Trace Python frames too: for versions without ranges; slows the CPU.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the traces must be there.")] = 300.0,
    api_key: Annotated[str | None, typer.Option(help="Of the server.", envvar="EAGLE3_API_KEY")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --trace: draft steps, for the planner's point.")
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=2, help="With --trace: tokens verified; default: steps + 1.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="With --trace: requests at once, where the trace does not say.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write besides (.png, .svg or .pdf); needs the extra `plot`.")
    ] = None,
) -> None:
    """Splits a decode cycle into draft, verify, sampling, communication and overhead (docs/profile.md).

    Either traces a running server, or reads traces that are there.
    """
    from eagle3.serve.profile import (
        CaptureOptions,
        capture,
        profile_captured,
        profile_json,
        profile_traces,
        render_profile,
    )

    with problems_as(as_json):
        raise_problems(_options(server, prompts, output, trace, target))
        if plot is not None:
            from eagle3.serve.profile.plot import check_picture

            check_picture(plot)
        if trace:
            found = profile_traces(trace, steps, draft_tokens, batch)
        else:
            assert server is not None and prompts is not None and output is not None
            options = CaptureOptions(
                server,
                prompts,
                output,
                concurrency,
                cycles,
                requests,
                max_new_tokens,
                with_stack,
                timeout,
                api_key,
                target,
            )
            taken = capture(options)
            for path in taken.traces:
                typer.echo(f"trace: {path}", err=True)
            found = profile_captured(taken)
        if plot is not None:
            from eagle3.serve.profile.plot import plot_profile

            plot_profile(found, plot)
    print(profile_json(found) if as_json else render_profile(found))


def _options(
    server: str | None, prompts: Path | None, output: Path | None, trace: list[Path] | None, target: str | None
) -> list[Problem]:
    """What is missing, or cannot be together."""
    given: dict[str, object] = {"--server": server, "--prompts": prompts, "--output": output}
    if trace:
        wrong = [name for name, value in {**given, "--target": target}.items() if value is not None]
        message, fix = "reads traces, and asks no server", "leave them out, or leave out --trace"
    else:
        wrong = [name for name, value in given.items() if value is None]
        message, fix = "is missing", "give --server, --prompts and --output, or --trace"
    return [Problem(name, "profile.options", message, fix) for name in wrong]

"""`eagle3 decode`: real speculative decoding in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import AsJson, ConfigFile, epilog, problems_as, run_config
from eagle3.config import DecodeConfig
from eagle3.errors import problem_error

decode_app = typer.Typer()


@decode_app.command(epilog=epilog(DecodeConfig))
def decode(
    config: ConfigFile = None,
    checkpoint: Annotated[str | None, typer.Option(help="Run folder or exported checkpoint.")] = None,
    target: Annotated[str | None, typer.Option(help="The target's checkpoint folder, or its id on the hub.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Set of prompts; more of them may follow.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Draft steps a round.")] = None,
    topk: Annotated[int | None, typer.Option(help="Branches a step; 1 is a chain.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens that the target verifies a round.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    output: Annotated[str | None, typer.Option(help="File of answers to write, and to go on from.")] = None,
    verify: Annotated[
        bool | None, typer.Option("--verify/--no-verify", help="Compare with the target's own greedy decoding.")
    ] = None,
    baseline: Annotated[
        bool | None, typer.Option("--baseline/--no-baseline", help="Time the target alone too.")
    ] = None,
    as_json: AsJson = False,
    rest: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE | KEY=VALUE]...", help="More sets; overrides, see below.")
    ] = None,
) -> None:
    """Answers by real speculative decoding over a Transformers target, and what was accepted (docs/decode.md).

    Exit code 2 if a greedy answer is not the target's own and rounding does not explain it. A run with an output
    goes on where it was stopped.
    """
    more = [item for item in rest or [] if "=" not in item or Path(item).is_file()]
    sets = [*(prompts or []), *more]
    given = {
        "checkpoint": checkpoint,
        "target.path": target,
        "prompts": sets or None,
        "steps": steps,
        "topk": topk,
        "draft_tokens": draft_tokens,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "output": output,
        "verify": verify,
        "baseline": baseline,
    }
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    with problems_as(as_json):
        if more and not prompts:
            message = f"{more[0]!r} is no key=value, and --prompts is not given"
            raise problem_error("command line", "config.override", message, "give --prompts before files of prompts")
        overrides = [item for item in rest or [] if item not in more]
        cfg = run_config(DecodeConfig, config, [*options, *overrides])
        from eagle3.evaluate.decode.run import run_decode

        report = run_decode(cfg)
    print(report.to_json() if as_json else report.render())
    raise typer.Exit(report.exit_code)

"""`eagle3 serve wait`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import AsJson, problems_as


def wait(
    url: Annotated[str | None, typer.Argument(help="Address of the server, e.g. http://localhost:30000.")] = None,
    log: Annotated[Path | None, typer.Option(help="File that gets its output; it need not be there yet.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="SGLang's version; another one is an error.")] = None,
    passive_health: Annotated[
        bool,
        typer.Option(
            "--passive-health", help="It was started with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0: ask /health."
        ),
    ] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds; default: as long as it takes.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="EAGLE3_API_KEY", help="API key of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until an SGLang server takes requests, without making it generate a token (docs/serving.md)."""
    from eagle3.serve.wait import wait_until_ready
    from eagle3.serve.wait.show import shown_progress

    with problems_as(as_json), shown_progress() as show:
        ready = wait_until_ready(
            url,
            log=log,
            version=engine_version,
            passive_health=passive_health,
            timeout=timeout,
            api_key=api_key,
            on_progress=show,
        )
    print(ready.render(as_json))

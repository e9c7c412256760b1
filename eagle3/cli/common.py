"""What the groups of commands share: options, configs as help, problems as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from eagle3.config import CacheSection, ExtractConfig, Section, field_help, load_config
from eagle3.errors import EXIT_PROBLEMS, ProblemsError

ConfigT = TypeVar("ConfigT", bound=Section)
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML config, e.g. one of configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, see below.")]
Cache = Annotated[Path | None, typer.Option(help="Of a store at a URL: local folder that it is read through.")]
CacheBytes = Annotated[int | None, typer.Option(min=1, help="Most bytes in that folder; default: 100 GiB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@contextmanager
def problems_as(as_json: bool) -> Iterator[None]:
    """With `--json`, problems that end a command are its report, on stdout; see docs/schemas/problems.schema.json."""
    try:
        yield
    except ProblemsError as error:
        if not as_json:
            raise
        from eagle3.wiring.report import render_json

        print(render_json(error.problems))
        raise typer.Exit(EXIT_PROBLEMS) from None


def epilog(model: type[Section], skip: tuple[str, ...] = ()) -> str:
    """The config's fields, but for `skip`, as help text: one source with the config itself."""
    lines = [f"{key} [{default}]: {text}" for key, default, text in field_help(model) if key not in skip]
    return "\b\nConfig keys, with their defaults:\n" + "\n".join(lines)


def cache_section(folder: Path | None, max_bytes: int | None) -> CacheSection | None:
    """What the options `--cache` and `--cache-max-bytes` say; None without a folder."""
    if folder is None:
        return None
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}
    return CacheSection(folder=str(folder), **limit)


def conversations_config(path: Path | None, overrides: list[str] | None) -> ExtractConfig:
    """The config of an extraction of which only target and conversations are used: the states' layers and place, which
    it must have elsewhere, may be left out."""
    return load_config(ExtractConfig, path, overrides or [], {"output": ".", "output_indices": [0]})


def run_config(model: type[ConfigT], path: Path | None, overrides: list[str] | None) -> ConfigT:
    return load_config(model, path, overrides or [])

"""`eagle3 data`: conversations and hidden-state stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from eagle3.cli.common import (
    AsJson,
    Cache,
    CacheBytes,
    ConfigFile,
    Overrides,
    cache_section,
    conversations_config,
    epilog,
    problems_as,
    run_config,
)
from eagle3.config import ConversationsConfig, ExtractConfig, ImportConfig
from eagle3.errors import problem_error
from eagle3.files import explained_os_errors, is_url, write_text_atomic

data_app = typer.Typer(help="Conversations and hidden-state stores.", no_args_is_help=True)

Workers = Annotated[int | None, typer.Option(min=1, help="Files read at a time; default: one a core, 8 at most.")]
CopyWorkers = Annotated[int, typer.Option(min=1, max=64, help="Files at a time.")]
Link = Annotated[bool, typer.Option("--link", help="Hard links instead of copies, where the file system allows.")]
Resume = Annotated[Path | None, typer.Option(help="Remember in this file what was found whole, and go on from it.")]


@data_app.command("verify")
def data_verify(
    folder: Annotated[str, typer.Argument(help="Hidden-state store: folder or URL.")],
    deep: Annotated[bool, typer.Option("--deep/--quick", help="Read every byte, or sizes and headers only.")] = True,
    workers: Workers = None,
    resume: Resume = None,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """Whether a store is whole; exit code 0 or 2."""
    from eagle3.data.store_verify import verify
    from eagle3.wiring.report import exit_code, render_json, render_text

    with problems_as(as_json):
        if is_url(folder):
            from eagle3.data.remote_verify import verify_remote

            problems = verify_remote(folder, deep, cache_section(cache, cache_max_bytes), workers, resume)
        else:
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

    with problems_as(as_json):
        report = repair(folder, yes, workers, resume, list_file)
    print(report.render(as_json))
    raise typer.Exit(exit_code(report.open_problems))


@data_app.command("inspect")
def data_inspect(
    folder: Annotated[str, typer.Argument(help="Hidden-state store: folder or URL.")],
    sample: Annotated[str | None, typer.Option(help="Id of a sample to show; with --target alone: the first.")] = None,
    target: Annotated[str | None, typer.Option(help="Target's folder or hub id; default: as recorded.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="For the tokenizer's code.")] = False,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """Contract, counts and histograms of a store, and a sample with its supervised tokens highlighted."""
    from eagle3.data.store_inspect import inspect_store, marked, render_inspection, sample_dict, sample_parts

    with problems_as(as_json):
        found = inspect_store(folder)
        shown = None
        if sample is not None or target is not None:
            shown = sample_parts(folder, sample, target, trust_remote_code, cache_section(cache, cache_max_bytes))
    if as_json:
        print(json.dumps({**found, "sample": shown and sample_dict(*shown)}, indent=2, ensure_ascii=False))
        return
    print(render_inspection(found))
    if shown is not None:
        name, parts = shown
        console = Console(highlight=False, soft_wrap=True)
        print(f"\nsample {name!r}, its supervised tokens {'highlighted' if console.is_terminal else 'as {+this+}'}:")
        text = Text.assemble(*((part, "bold green" if marks else "") for part, marks in parts))
        console.print(text if console.is_terminal else Text(marked(parts)))


@data_app.command("show", epilog=epilog(ConversationsConfig, skip=("path",)))
def data_show(
    place: Annotated[str, typer.Argument(help="Conversation file, data set or hidden-state store; folder or URL.")],
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(help="Target's folder or hub id, for its tokenizer; of a store: as recorded.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Samples to show.")] = 3,
    sample: Annotated[str | None, typer.Option("--id", help="Show this sample or conversation alone.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here instead.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="For the tokenizer's code.")] = False,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
) -> None:
    """Samples token by token, the supervised ones highlighted."""
    from eagle3.data.show.find import find_samples
    from eagle3.data.show.page import samples_page
    from eagle3.data.show.terminal import print_samples

    found = find_samples(
        place,
        overrides or [],
        target=target,
        limit=limit,
        sample_id=sample,
        trust_remote_code=trust_remote_code,
        cache=cache_section(cache, cache_max_bytes),
    )
    if html is None:
        print_samples(found.samples, found.about, Console(highlight=False, soft_wrap=True))
        return
    with explained_os_errors(html):
        write_text_atomic(html, samples_page(found.samples, found.about))
    print(f"{html}: {len(found.samples):,} samples")


@data_app.command("check", epilog=epilog(ExtractConfig))
def data_check(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """What would become of an extraction's conversations: kept, dropped and why, by source; exit code 0 or 2."""
    from eagle3.target.source import check_data

    with problems_as(as_json):
        report = check_data(conversations_config(config, overrides))
    print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) if as_json else report)


@data_app.command("merge")
def data_merge(
    out: Annotated[Path, typer.Argument(help="Folder of the new store.")],
    stores: Annotated[list[Path], typer.Argument(help="Hidden-state stores, two at least.")],
    allow_different_data: Annotated[
        bool, typer.Option("--allow-different-data", help="They may be of different conversations.")
    ] = False,
    link: Link = False,
) -> None:
    """One store of several; what was begun goes on."""
    from eagle3.data.store_merge import merge

    print(merge(out, stores, allow_different_data, link).render())


@data_app.command("split")
def data_split(
    folder: Annotated[Path, typer.Argument(help="Hidden-state store.")],
    out: Annotated[Path, typer.Argument(help="Folder for part-00000, part-00001 ...")],
    parts: Annotated[int | None, typer.Option(help="Runs of about as many tokens, of whole shards.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Or: a random fraction of the samples, and the rest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random fraction; default: 0.")] = None,
    link: Link = False,
) -> None:
    """Several stores of one, which stays; what was begun goes on."""
    from eagle3.data.store_split import split_fraction, split_parts

    if (parts is None) == (fraction is None) or (parts is not None and seed is not None):
        fix = "give --parts, or --fraction and perhaps --seed"
        raise problem_error("data split", "split.how", "needs one way to cut the store", fix)
    if parts is not None:
        reports = split_parts(folder, out, parts, link)
    else:
        assert fraction is not None
        reports = split_fraction(folder, out, fraction, seed or 0, link)
    for report in reports:
        print(report.render())


@data_app.command("push")
def data_push(
    folder: Annotated[Path, typer.Argument(help="Hidden-state store.")],
    url: Annotated[str, typer.Argument(help="Where it goes, e.g. s3://bucket/folder: a place of its own.")],
    workers: CopyWorkers = 8,
) -> None:
    """A whole store to an object store, its manifest last; what was begun goes on."""
    from eagle3.data.remote_copy import push

    print(push(folder, url, workers).render())


@data_app.command("pull")
def data_pull(
    url: Annotated[str, typer.Argument(help="Store in an object store.")],
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    workers: CopyWorkers = 8,
) -> None:
    """A whole store from an object store, its manifest last; what was begun goes on."""
    from eagle3.data.remote_copy import pull

    print(pull(url, folder, workers).render())


@data_app.command("estimate", epilog=epilog(ExtractConfig))
def data_estimate(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Tokens, bytes by type and hours of an extraction, before it; exit code 0 or 2."""
    from eagle3.target.estimate import dry_run
    from eagle3.wiring.report import exit_code

    report = dry_run(run_config(ExtractConfig, config, overrides), by_dtype=True)
    print(report.render())
    raise typer.Exit(exit_code(report.problems))


@data_app.command("import", epilog=epilog(ImportConfig))
def data_import(
    config: ConfigFile = None,
    overrides: Overrides = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Do not hold the files against the target.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out and count bad samples.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check and probe everything, and write nothing.")] = False,
) -> None:
    """A dump of SpecForge, speculators or Model-Optimizer as a store; see docs/import.md.

    What was begun goes on.
    """
    from eagle3.target.import_dump import run_import

    chosen = ["probe=false"] * no_probe + ["skip_bad=true"] * skip_bad
    print(run_import(run_config(ImportConfig, config, [*(overrides or []), *chosen]), dry).render())

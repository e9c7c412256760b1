"""`eagle3 vocab`: which target tokens a drafter can propose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.common import (
    AsJson,
    Cache,
    CacheBytes,
    ConfigFile,
    Overrides,
    cache_section,
    conversations_config,
    epilog,
)
from eagle3.config import CacheSection, ExtractConfig
from eagle3.errors import problem_error

vocab_app = typer.Typer(help="Which target tokens a drafter can propose.", no_args_is_help=True)

Store = Annotated[str | None, typer.Option(help="Hidden-state store (folder or URL), in place of conversations.")]
Sample = Annotated[int | None, typer.Option(min=2, help="Count so many samples, drawn at random, in place of all.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the draw.")]
Add = Annotated[str, typer.Option(help="Ids that it must hold, e.g. 5,17.")]
Remove = Annotated[str, typer.Option(help="Ids that it must not hold.")]


@vocab_app.command("show", epilog=epilog(ExtractConfig))
def vocab_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    store: Store = None,
    file: Annotated[Path | None, typer.Option(help="A vocab file, in place of counting.")] = None,
    sample: Sample = None,
    seed: Seed = 0,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """What draft vocabs of 8k to 64k tokens would hold, in all and by source; or what a vocab file is."""
    if file is not None:
        from eagle3.data.vocab_file import read_vocab

        found = read_vocab(file)
        values = {"digest": found.vocab.digest, "forced": found.forced, "size": len(found.vocab), **found.counted}
        print(json.dumps(values, indent=2) if as_json else found.render())
        return
    from eagle3.target.vocab import count_conversations, count_dataset

    if store is not None:
        report = count_dataset(store, sample, seed, cache_section(cache, cache_max_bytes)).report()
    else:
        report = count_conversations(conversations_config(config, overrides), sample, seed).report()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.render())


@vocab_app.command("make", epilog=epilog(ExtractConfig))
def vocab_make(
    out: Annotated[Path, typer.Argument(help="Vocab file to write; `eagle3 train vocab_file=...` takes it.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    size: Annotated[int, typer.Option(min=1, help="Tokens.")] = 32_000,
    store: Store = None,
    add: Add = "",
    remove: Remove = "",
    sample: Sample = None,
    seed: Seed = 0,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
) -> None:
    """A draft vocab: special, tool and think tokens, then the most frequent ones."""
    from eagle3.target.vocab import count_conversations, count_dataset

    section: CacheSection | None = cache_section(cache, cache_max_bytes)
    chosen = (_ids(add, "--add"), _ids(remove, "--remove"))
    if store is not None:
        counted = count_dataset(store, sample, seed, section)
    else:
        counted = count_conversations(conversations_config(config, overrides), sample, seed)
    made = counted.choose(size, *chosen)
    made.write(out)
    print(f"{out}: {made.render()}")


@vocab_app.command("edit")
def vocab_edit(
    file: Annotated[Path, typer.Argument(help="Vocab file.")],
    out: Annotated[Path, typer.Argument(help="Vocab file to write.")],
    add: Add = "",
    remove: Remove = "",
) -> None:
    """A vocab file with more and fewer ids; those that are added are forced from now on."""
    from eagle3.data.vocab_file import read_vocab

    changed = read_vocab(file).changed(_ids(add, "--add"), _ids(remove, "--remove"))
    changed.write(out)
    print(f"{out}: {changed.render()}")


def _ids(text: str, option: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        message = f"is {text!r}, expected token ids"
        raise problem_error(option, "vocab.ids", message, "write them with commas, e.g. 5,17") from None

"""Joins stores of one target, one wiring and one way to make samples into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.data.store_build import BuildReport, Source, build_store, check_room
from eagle3.data.store_folder import differing_settings, refuse_url_output
from eagle3.data.store_format import SAMPLE_COUNT
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json
from eagle3.provenance import provenance

DATA_SETTING = "conversations"
"""The digest of the conversations that a store was made of."""

_IDS_SHOWN = 20


def merge(
    out: Path | str, folders: Sequence[Path], allow_different_data: bool = False, link: bool = False
) -> BuildReport:
    """Makes the store `out` of all samples of these stores, in their order.

    Its settings are theirs, but that `conversations` is a digest over all of theirs and the shards: no extraction goes
    on with a merged store. `provenance.merged` names each store, its conversations and its own provenance.

    Args:
        out: a new folder, or one that the same merge began.
        folders: of the stores, two at least.
        allow_different_data: they may be of different conversations.
        link: take shards as hard links where the file system allows it.

    Raises:
        ProblemsError: a store is not whole; they differ (every difference is listed); an id is in two of them; the disk
            cannot hold it.
    """
    refuse_url_output(out)
    out = Path(out)
    if len(folders) < 2:
        fix = "give the folder of the new store first, then two stores at least"
        raise problem_error(str(out), "merge.one_store", "there is only one store to merge into it", fix)
    sources = [Source.open(Path(folder)) for folder in folders]
    problems = [problem for other in sources[1:] for problem in _differences(sources[0], other, allow_different_data)]
    raise_problems([*problems, *_duplicates(sources)], f"cannot merge into {out}")
    pieces = [piece for source in sources for piece in source.pieces([True] * len(source.reader))]
    check_room(out, [pieces], link)
    settings = sources[0].manifest.settings | {DATA_SETTING: digest_json([_identity(source) for source in sources])}
    if SAMPLE_COUNT in settings:
        settings[SAMPLE_COUNT] = sum(len(source.reader) for source in sources)
    merged = [
        {
            "store": str(source.folder),
            "samples": len(source.reader),
            DATA_SETTING: source.manifest.settings.get(DATA_SETTING),
            "provenance": source.manifest.provenance,
        }
        for source in sources
    ]
    return build_store(out, pieces, settings, {**provenance(), "merged": merged}, link)


def _identity(source: Source) -> list[Any]:
    """What tells a store from others, wherever it is."""
    return [source.manifest.settings.get(DATA_SETTING), [shard.sha256 for shard in source.manifest.shards]]


def _differences(first: Source, other: Source, allow_different_data: bool) -> Iterator[Problem]:
    mine, theirs = str(first.folder), str(other.folder)
    yield from first.manifest.contract.compare(other.manifest.contract, mine, theirs)
    yield from _layout_differences(first, other)
    if first.manifest.target_head.sha256 != other.manifest.target_head.sha256:
        message = f"holds another embedding, norm or head than {mine}"
        yield Problem(theirs, "merge.target_head", message, "extract both from the same weights")
    for key, ours, others in differing_settings(first.manifest.settings, other.manifest.settings):
        if key == SAMPLE_COUNT or (key == DATA_SETTING and allow_different_data):
            continue
        fix = "extract one of them again with the settings of the other"
        if key == DATA_SETTING:
            fix = "pass --allow-different-data if they are to be one data set"
        yield Problem(theirs, "merge.settings", f"settings.{key} is {others} here, {ours} in {mine}", fix)


def _layout_differences(first: Source, other: Source) -> Iterator[Problem]:
    ours, others = first.manifest.layout, other.manifest.layout
    fix = "make one of them anew with `eagle3 extract --from`"
    if ours.version != others.version:
        message = f"is of format version {others.version}, {first.folder} of version {ours.version}"
        yield Problem(str(other.folder), "merge.version", message, fix)
    elif ours.last_rows != others.last_rows:
        message = f"has last hidden states for {others.last_rows} tokens, {first.folder} for {ours.last_rows}"
        yield Problem(str(other.folder), "merge.last_rows", message, fix)


def _duplicates(sources: Sequence[Source]) -> Iterator[Problem]:
    """One problem for each two stores that share samples, naming them."""
    for place, source in enumerate(sources):
        ids = {sample.id for sample in source.reader.samples}
        for other in sources[place + 1 :]:
            if twice := [sample.id for sample in other.reader.samples if sample.id in ids]:
                more = f" and {len(twice) - _IDS_SHOWN:,} more" if len(twice) > _IDS_SHOWN else ""
                said = ", ".join(map(repr, twice[:_IDS_SHOWN]))
                message = f"shares {len(twice):,} samples with {source.folder}: {said}{more}"
                yield Problem(str(other.folder), "store.duplicate_sample", message, "merge stores of different samples")

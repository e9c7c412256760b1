"""Cuts a store into several: equal parts, or a random fraction and the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from eagle3.data.store_build import BuildReport, Piece, Source, build_store, check_room
from eagle3.data.store_folder import refuse_url_output
from eagle3.data.store_format import SAMPLE_COUNT
from eagle3.data.store_merge import DATA_SETTING
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json
from eagle3.provenance import provenance


def split_parts(folder: Path | str, out: Path | str, parts: int, link: bool = False) -> list[BuildReport]:
    """Makes stores `out/part-00000` ... of runs of samples of about as many tokens each, in the store's order.

    Shards stay whole, unless there are fewer than parts.

    Args:
        folder: of the store, which stays as it is.
        out: a new folder, or one that the same split began.
        parts: how many, two at least.
        link: take whole shards as hard links where the file system allows it.

    Raises:
        ProblemsError: the store is not whole; it has fewer samples than parts; the disk cannot hold it.
    """
    refuse_url_output(out)
    source = Source.open(Path(folder))
    count = len(source.reader)
    if not 2 <= parts <= count:
        message = f"has {count:,} samples, which are not to be cut into {parts}"
        raise problem_error(str(folder), "split.parts", message, "give 2 parts at least, and one sample to each")
    units = [len(shard.samples) for shard in source.manifest.shards] if len(source.manifest.shards) >= parts else []
    units = units or [1] * count
    ends = list(accumulate(units))
    tokens = [0, *accumulate(sample.tokens for sample in source.reader.samples)]
    sizes = [tokens[end] - tokens[end - unit] for end, unit in zip(ends, units, strict=True)]
    part_of = [part for part, run in enumerate(_runs(sizes, parts)) for unit in run for _ in range(units[unit])]
    return _split(source, Path(out), part_of, parts, {"parts": parts}, link)


def split_fraction(
    folder: Path | str, out: Path | str, fraction: float, seed: int = 0, link: bool = False
) -> list[BuildReport]:
    """Makes `out/part-00000` of a random fraction of the samples, and `out/part-00001` of the others.

    Args:
        fraction: of the samples, above 0 and below 1; each store gets one at least.
        seed: the same seed chooses the same samples of the same store.

    Raises:
        ProblemsError: as `split_parts`.
    """
    refuse_url_output(out)
    source = Source.open(Path(folder))
    count = len(source.reader)
    if not 0 < fraction < 1 or count < 2:
        message = f"has {count:,} samples, which are not to be cut at {fraction}"
        raise problem_error(str(folder), "split.fraction", message, "give a fraction between 0 and 1, and two samples")
    chosen = set(random.Random(seed).sample(range(count), min(max(round(fraction * count), 1), count - 1)))
    part_of = [0 if index in chosen else 1 for index in range(count)]
    return _split(source, Path(out), part_of, 2, {"fraction": fraction, "seed": seed}, link)


def _split(
    source: Source, out: Path, part_of: Sequence[int], parts: int, how: dict[str, float], link: bool
) -> list[BuildReport]:
    """A part's `conversations` is a digest over the store's and the part's ids: no extraction fills it up again."""
    pieces = [source.pieces([at == part for at in part_of]) for part in range(parts)]
    raise_problems(_without_fingerprint(source, out, pieces), f"cannot split {source.folder}")
    check_room(out, pieces, link)
    reports = []
    for part, mine in enumerate(pieces):
        ids = [sample.id for piece in mine for sample in piece.samples]
        data = digest_json([source.manifest.settings.get(DATA_SETTING), ids])
        told = {**how, "part": part, "store": str(source.folder), "provenance": source.manifest.provenance}
        settings = source.manifest.settings | {DATA_SETTING: data}
        if SAMPLE_COUNT in settings:
            settings[SAMPLE_COUNT] = len(ids)
        reports.append(build_store(out / f"part-{part:05d}", mine, settings, {**provenance(), "split": told}, link))
    return reports


def _without_fingerprint(source: Source, out: Path, pieces: Sequence[Sequence[Piece]]) -> Iterator[Problem]:
    """Parts whose first shard would have no last hidden states to make a fingerprint of."""
    known = source.manifest.fingerprint
    if source.manifest.layout.last_rows == "all":
        return
    for part, mine in enumerate(pieces):
        samples = mine[0].samples
        if any(sample.supervised or (known is not None and sample.id == known.sample) for sample in samples):
            continue
        message = f"no sample of its first shard would have a supervised token (samples {samples[0].id} ...)"
        fix = "take other parts, another fraction or seed, or a store with last_hidden_rows=all"
        yield Problem(str(out / f"part-{part:05d}"), "fingerprint.nothing_supervised", message, fix)


def _runs(sizes: Sequence[int], parts: int) -> list[range]:
    """Cuts a list into runs of about equal sums, none of them empty."""
    sums, runs, begin = list(accumulate(sizes)), [], 0
    for part in range(parts):
        last = len(sizes) - (parts - part - 1)
        end = next((end for end in range(begin + 1, last) if sums[end - 1] * parts >= sums[-1] * (part + 1)), last)
        runs.append(range(begin, end))
        begin = end
    return runs

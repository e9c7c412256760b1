"""What is in a hidden-state store, in words: from its manifest alone, but for a sample that is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3.config import CacheSection
from eagle3.data.chat import Tokenizer, load_tokenizer, tokenizer_digest
from eagle3.data.open_reader import open_reader
from eagle3.data.show.printable import printable
from eagle3.data.store import StoreReader
from eagle3.data.store_format import Manifest, SampleInfo, load_manifest
from eagle3.errors import problem_error
from eagle3.files import is_url
from eagle3.wiring.layers import describe_layers
from eagle3.wiring.report import ExplainRow, aligned, explain_wiring, render_explain

_BAR_WIDTH = 40
_TENTHS = 10
_NORM_WORDS = {"post_norm": "after the final norm", "pre_norm": "before the final norm"}
_SHOWN_CHARACTERS = 80

Part = tuple[str, bool]
"""Text, and whether its tokens are supervised."""


def inspect_store(folder: Path | str) -> dict[str, Any]:
    """JSON values that describe a store, in a folder or at a URL; docs/stores.md lists them. Reads the manifest only.

    Raises:
        ProblemsError: the manifest cannot be read.
    """
    if is_url(folder):
        from eagle3.data.remote_files import read_remote_manifest
        from eagle3.data.remote_folder import RemoteFolder

        manifest = read_remote_manifest(RemoteFolder(str(folder)))[1]
    else:
        manifest = load_manifest(Path(folder))
    contract, samples = manifest.contract, [sample for shard in manifest.shards for sample in shard.samples]
    tokens, size = sum(sample.tokens for sample in samples), sum(shard.bytes for shard in manifest.shards)
    return {
        "store": str(folder),
        "contract": contract.to_dict(),
        "layers": [asdict(row) for row in explain_wiring(contract.wiring, contract.target_family)],
        "settings": manifest.settings,
        "counts": {
            "shards": len(manifest.shards),
            "samples": len(samples),
            "tokens": tokens,
            "supervised": sum(sample.supervised for sample in samples),
        },
        "bytes": {
            "shards": size,
            "target_head": manifest.target_head.bytes,
            "per_token": size / tokens if tokens else None,
        },
        "sources": _sources(samples),
        "lengths": _lengths([sample.tokens for sample in samples]),
        "loss_fractions": _fractions(samples),
        "provenance": manifest.provenance,
    }


def render_inspection(found: Mapping[str, Any]) -> str:
    """What `inspect_store` gives, as text."""
    contract, counts, size = found["contract"], found["counts"], found["bytes"]
    fraction = f" ({counts['supervised'] / counts['tokens']:.1%})" if counts["tokens"] else ""
    per_token = "" if size["per_token"] is None else f", {size['per_token']:,.1f} bytes a token"
    lines = [
        f"store {found['store']}",
        f"  target: {contract['target_name']} ({contract['target_family']}, {contract['num_hidden_layers']} layers, "
        f"hidden size {contract['hidden_size']:,}, vocabulary {contract['vocab_size']:,})",
        f"  aux hidden states: {describe_layers(contract['output_indices'])} (output indices "
        f"{', '.join(map(str, contract['output_indices']))}; layers count from 0)",
        f"  last hidden states: {_NORM_WORDS[contract['last_hidden_states']]} ({contract['last_hidden_states']})",
        f"  stored as {contract['dtype']}",
        *(f"  {name}: {value}" for name, value in contract.items() if name.endswith("_digest") and value),
        "",
        "what each engine calls these layers",
        *(f"  {line}" for line in render_explain([ExplainRow(**row) for row in found["layers"]]).splitlines()),
        "",
        "settings",
        *(f"  {key}: {_short(value)}" for key, value in found["settings"].items()),
        "",
        f"{counts['samples']:,} samples in {counts['shards']:,} shards: {counts['tokens']:,} tokens, of which "
        f"{counts['supervised']:,} supervised{fraction}",
        f"{size['shards']:,} bytes of shards{per_token}; {size['target_head']:,} bytes of target head",
    ]
    if any(row["source"] is not None for row in found["sources"]):
        columns = ("samples", "tokens", "supervised")
        table: list[tuple[str, ...]] = [("source", *columns)]
        table += [(_source_name(row["source"]), *(f"{row[key]:,}" for key in columns)) for row in found["sources"]]
        lines += ["", "samples by source", *(f"  {line}" for line in aligned(table))]
    if counts["samples"]:
        lines += ["", "samples by length in tokens", *_bars(found["lengths"])]
        lines += ["", "samples by loss fraction (supervised / all tokens)", *_bars(found["loss_fractions"])]
    return "\n".join(lines)


def sample_parts(
    folder: Path | str,
    sample_id: str | None = None,
    target: str | None = None,
    trust_remote_code: bool = False,
    cache: CacheSection | None = None,
) -> tuple[str, list[Part]]:
    """A sample's id, and its text by the target's tokenizer, cut where supervision begins and ends.

    Control characters are spelled out, so that the text can be printed.

    Args:
        sample_id: default: the first sample.
        target: folder or hub id of the target; default: where extraction read it.
        trust_remote_code: for a tokenizer that has its own code.
        cache: of a store at a URL.

    Raises:
        ProblemsError: the store is not whole or lacks the sample; the tokenizer cannot be loaded or is another one.
    """
    reader = open_reader(folder, cache)
    ids = [sample.id for sample in reader.samples]
    if sample_id is not None and sample_id not in ids:
        fix = f"give one of its {len(ids):,} samples, e.g. {ids[0]}"
        raise problem_error(str(folder), "inspect.no_sample", f"holds no sample {sample_id!r}", fix)
    index = 0 if sample_id is None else ids.index(sample_id)
    tokenizer = store_tokenizer(reader, target, trust_remote_code)
    tokens, mask = (tensor.tolist() for tensor in reader.read_tokens(index))
    runs = groupby(zip(tokens, mask, strict=True), key=lambda item: item[1])
    return ids[index], [
        (printable(str(tokenizer.decode([token for token, _ in run]))), supervised) for supervised, run in runs
    ]


def store_tokenizer(reader: StoreReader, target: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer that made a store's ids.

    Args:
        target: folder or hub id of the target; default: where extraction read it.

    Raises:
        ProblemsError: it cannot be loaded, or is another one.
    """
    path = target or recorded_target(load_manifest(reader.folder)) or reader.contract.target_name
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    if (digest := tokenizer_digest(tokenizer)) != reader.contract.tokenizer_digest:
        message = f"its tokenizer is {digest}, the store's ids are of {reader.contract.tokenizer_digest}"
        raise problem_error(path, "inspect.other_tokenizer", message, "give the target that the store was made with")
    return tokenizer


def sample_dict(sample_id: str, parts: Sequence[Part]) -> dict[str, Any]:
    """What `sample_parts` gives, as JSON values."""
    return {"id": sample_id, "parts": [{"text": text, "supervised": supervised} for text, supervised in parts]}


def marked(parts: Sequence[Part]) -> str:
    """The text with marks around what is supervised, for where there are no colours."""
    return "".join(f"{{+{text}+}}" if supervised else text for text, supervised in parts)


def recorded_target(manifest: Manifest) -> str | None:
    """The target's path in the config that extraction recorded."""
    config = manifest.provenance.get("config")
    target = config.get("target") if isinstance(config, dict) else None
    path = target.get("path") if isinstance(target, dict) else None
    return path if isinstance(path, str) else None


def _sources(samples: Sequence[SampleInfo]) -> list[dict[str, Any]]:
    """Samples, tokens and supervised tokens of each source, by name; those that name none come last."""
    found: dict[str | None, list[int]] = {}
    for sample in samples:
        counts = found.setdefault(sample.source, [0, 0, 0])
        for place, value in enumerate((1, sample.tokens, sample.supervised)):
            counts[place] += value
    names = sorted(found, key=lambda name: (name is None, name))
    return [
        {"source": name, **dict(zip(("samples", "tokens", "supervised"), found[name], strict=True))} for name in names
    ]


def _source_name(name: str | None) -> str:
    return "no source" if name is None else printable(name)


def _lengths(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Samples by length; each bucket ends at twice its beginning."""
    counts = Counter(length.bit_length() - 1 for length in lengths)
    powers = range(min(counts), max(counts) + 1) if counts else ()
    return [{"from": 1 << power, "below": 2 << power, "samples": counts[power]} for power in powers]


def _fractions(samples: Sequence[SampleInfo]) -> list[dict[str, Any]]:
    """Samples by loss fraction, in tenths; the last bucket holds 1.0 too, whatever `below` says."""
    counts = Counter(min(_TENTHS * sample.supervised // sample.tokens, _TENTHS - 1) for sample in samples)
    return [
        {"from": tenth / _TENTHS, "below": (tenth + 1) / _TENTHS, "samples": counts[tenth]} for tenth in range(_TENTHS)
    ]


def _bars(buckets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    most = max(bucket["samples"] for bucket in buckets)
    names = aligned([(f"{bucket['from']:,}", f"to <{bucket['below']:,}") for bucket in buckets])
    width = max(map(len, names))
    for name, bucket in zip(names, buckets, strict=True):
        bar = "#" * -(-_BAR_WIDTH * bucket["samples"] // most)
        yield f"  {name.ljust(width)}  {bar.ljust(_BAR_WIDTH)}  {bucket['samples']:,}".rstrip()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."

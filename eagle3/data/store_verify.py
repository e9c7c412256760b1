"""Whether a store is whole, to the last byte: every shard read by several threads, with progress that survives a kill.

Neither this nor any other check can prove that the states came from the layers that the contract names: that needs
the target model (`eagle3 wiring probe`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.data.argmax_check import argmax_problems, stored_head
from eagle3.data.open_shard import OpenShard
from eagle3.data.store_check import REDO, check_store, samples_said
from eagle3.data.store_format import FileInfo, Manifest, SampleInfo, ShardInfo, load_manifest, sample_rows
from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import range_faults
from eagle3.data.verify_record import VerifyRecord
from eagle3.draft.loss import TargetHead
from eagle3.draft.states import FP8, are_scales, has_nan
from eagle3.errors import Problem, ProblemsError
from eagle3.files import sha256_file
from eagle3.progress import progress
from eagle3.wiring.contract import WiringContract

_REDO_DEEP = f"`eagle3 data repair --yes` drops that shard; then {REDO}"
_CHUNK_TOKENS = 128
_MOST_WORKERS = 8


def verify(
    folder: Path | str,
    deep: bool = False,
    expected: WiringContract | None = None,
    workers: int | None = None,
    resume: Path | None = None,
) -> list[Problem]:
    """Everything that is wrong with a store.

    Args:
        folder: the store.
        deep: also read every byte: checksums, finite states, ids inside the vocabulary, supervised counts; and find a
            few greedy tokens of each shard anew.
        expected: the contract that the caller needs; every difference is a problem.
        workers: files that are read at a time; default: one a core, 8 at most.
        resume: file outside the store that remembers which files were found whole; a deep verification that was
            stopped goes on from there. It is removed once all are whole.

    Raises:
        ProblemsError: `resume` is no such file, is inside the store, or cannot be written.
    """
    folder = Path(folder)
    try:
        manifest = load_manifest(folder)
    except ProblemsError as error:
        return list(error.problems)
    return verify_manifest(folder, manifest, deep, expected, workers, resume)


def verify_manifest(
    folder: Path,
    manifest: Manifest,
    deep: bool = False,
    expected: WiringContract | None = None,
    workers: int | None = None,
    resume: Path | None = None,
) -> list[Problem]:
    """As `verify`, of a manifest that was read already."""
    problems = check_store(folder, manifest, expected)
    if not deep:
        return problems
    broken = {problem.where for problem in problems}
    files = [file for file in (manifest.target_head, *manifest.shards) if str(folder / file.file) not in broken]
    head = stored_head(folder, manifest) if manifest.target_head in files else None
    if resume is None:
        return problems + _check_files(folder, manifest, files, head, workers, lambda file: None)
    with VerifyRecord(resume, folder, manifest.contract) as record:
        lines = {file.file: record.line(file) for file in files}
        left = [file for file in files if lines[file.file] not in record]
        problems += _check_files(folder, manifest, left, head, workers, lambda file: record.add(lines[file.file]))
        if not problems:
            record.remove()
    return problems


def _check_files(
    folder: Path,
    manifest: Manifest,
    files: Sequence[FileInfo],
    head: TargetHead | None,
    workers: int | None,
    whole: Callable[[FileInfo], None],
) -> list[Problem]:
    """Reads these files; calls `whole` with each that has no problem. Problems come in the order of the files."""
    found: dict[str, list[Problem]] = {}
    pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    with progress("verify", sum(map(_tokens, files)), "tokens") as advance:
        try:
            futures = {pool.submit(check_file, folder, file, manifest.layout, head): file for file in files}
            for future in as_completed(futures):
                file = futures[future]
                found[file.file] = future.result()
                if not found[file.file]:
                    whole(file)
                advance(_tokens(file))
        finally:
            pool.shutdown(cancel_futures=True)
    return [problem for file in files for problem in found[file.file]]


def check_file(folder: Path, file: FileInfo, layout: StoreLayout, head: TargetHead | None = None) -> list[Problem]:
    """What is wrong with the bytes of a shard or of the target head, whose size and header are right.

    Args:
        head: of the store, to look at a few greedy tokens too.
    """
    try:
        problems = _check_sum(folder, file)
        if isinstance(file, ShardInfo):
            wrong = _check_values(folder, file, layout)
            if head is not None and not wrong:
                wrong = argmax_problems(folder / file.file, file, layout, head, _REDO_DEEP)
            problems += wrong
        return problems
    except OSError as error:  # a disk that fails
        message = f"cannot be read: {error.strerror or error} {samples_said(file)}".rstrip()
        return [Problem(str(folder / file.file), "store.unreadable", message, _REDO_DEEP)]
    except ProblemsError as error:  # a disk that fails, or the file changed since its header was checked
        inside = samples_said(file)
        return [replace(item, message=f"{item.message} {inside}", fix=_REDO_DEEP) for item in error.problems]


def _check_sum(folder: Path, file: FileInfo) -> list[Problem]:
    path = folder / file.file
    if sha256_file(path) == file.sha256:
        return []
    message = f"has the right size, but its checksum is not the manifest's {samples_said(file)}".rstrip()
    return [Problem(str(path), "store.checksum", message, _REDO_DEEP)]


def _check_values(folder: Path, shard: ShardInfo, layout: StoreLayout) -> list[Problem]:
    """The values of every sample, a chunk of rows at a time."""
    problems, rows, file = [], sample_rows(shard.samples, layout), OpenShard(folder / shard.file)
    for sample, (every, last) in zip(shard.samples, rows, strict=True):
        faults = [*_token_faults(file, every, sample, layout.contract), *_state_faults(file, every, last, layout)]
        if layout.has_argmax:
            argmax = file.rows("target_argmax", last).int()
            faults += range_faults(argmax, layout.contract.vocab_size, "target_argmax")
        for kind, message in faults:
            text = f"sample {sample.id!r} {message}"
            problems.append(Problem(str(folder / shard.file), f"store.{kind}", text, _REDO_DEEP))
    return problems


def _token_faults(
    file: OpenShard, rows: slice, sample: SampleInfo, contract: WiringContract
) -> Iterator[tuple[str, str]]:
    ids, mask = file.rows("input_ids", rows).int(), file.rows("loss_mask", rows)
    yield from range_faults(ids, contract.vocab_size)
    if mask.max() > 1:
        yield "loss_mask", f"has {mask.max()} in its loss mask, expected 0 or 1"
    elif mask.sum() != sample.supervised:
        yield "loss_mask", f"has {mask.sum()} supervised tokens, the manifest says {sample.supervised}"


def _state_faults(file: OpenShard, every: slice, last: slice, layout: StoreLayout) -> Iterator[tuple[str, str]]:
    for name, rows in (("aux_hidden_states", every), ("last_hidden_states", last)):
        begins = range(rows.start, rows.stop, _CHUNK_TOKENS)
        chunks = (file.rows(name, slice(begin, min(begin + _CHUNK_TOKENS, rows.stop))) for begin in begins)
        if not all(map(_finite, chunks)):
            yield "non_finite", f"has NaN or infinity in its {name}"
    for name, rows in (("aux_scales", every), ("last_scales", last)) if layout.scaled else ():
        if rows.stop > rows.start and not are_scales(file.rows(name, rows)):
            yield "scale", f"has numbers in its {name} that are no powers of two"


def _finite(states: torch.Tensor) -> bool:
    """Whether all is finite: NaN reaches both ends, and infinity is one. Fifty times as fast as `isfinite`."""
    if states.dtype == FP8:
        return not has_nan(states)
    low, high = states.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _tokens(file: FileInfo) -> int:
    return file.tokens if isinstance(file, ShardInfo) else 0

"""`eagle3 extract` with the streamed engine: this process's chunks, one pass over the weights for each.

A chunk's shards get their names when all of its rows are on disk. Their checksums are made, and the manifest lists
them, while the next chunk walks; a process that is killed before that lists them when it comes back. So a kill loses
the chunk that walks, and no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from eagle3.data.chat.sample_file import Each
from eagle3.data.shard_file import ShardFile, sample_info, shard_entry
from eagle3.data.store_check import check_shard, check_target_head
from eagle3.data.store_fingerprint import fingerprint_place
from eagle3.data.store_format import ShardInfo, shard_name
from eagle3.data.store_joint import JointStore
from eagle3.errors import raise_problems
from eagle3.progress import progress
from eagle3.target.engines.streamed import StreamedEngine
from eagle3.target.plan import ExtractPlan
from eagle3.target.selfcheck import self_check_streamed
from eagle3.target.shares import Chunk, Shard
from eagle3.target.spec import explained_loading
from eagle3.target.stream_plan import (
    StreamPlan,
    begun_manifest,
    begun_settings,
    make_stream_plan,
    missing_shards,
    scratch_folder,
    settle_sizes,
)
from eagle3.target.stream_sink import FingerprintRows, Part, ShardSink, blocks_waiting, stager
from eagle3.target.streaming.memory import explained_memory
from eagle3.target.streaming.reader import check_vectors
from eagle3.target.write import origin
from eagle3.wiring.fingerprint_file import Fingerprint

HASHERS = 4


def extract_streamed(plan: ExtractPlan) -> tuple[int, list[str]]:
    """Does this process's share of what the store lacks.

    Returns:
        How many samples it added, and a line for each process whose share is not there yet.

    Raises:
        ProblemsError: as `run_extract`; this machine has too little memory, or another process of this number is at
            work.
    """
    stream = make_stream_plan(plan, begun_settings(plan))
    say(*stream.memory.lines(), *stream.advice())
    if _is_done(stream):
        say(f"nothing is left to do for process {stream.process.index}")
        return 0, _lacking(stream)
    with ExitStack() as stack:
        engines = stack.enter_context(ExitStack())
        engine = engines.enter_context(closing(make_engine(stream)))
        check_engine(stream, engine)
        store = stack.enter_context(_open_store(plan, stream, engine))
        if store.settings != stream.plan.settings:  # another process began it meanwhile, with other sizes
            engines.close()
            stream = make_stream_plan(plan, store.settings)
            engine = engines.enter_context(closing(make_engine(stream)))
        for problem in store.redone:
            say(f"redone: {problem}")
        _adopt(stream, store)
        added = _walk_share(stream, engine, store)
    return added, _lacking(stream)


def make_engine(stream: StreamPlan) -> StreamedEngine:
    """The engine of a plan."""
    cfg = stream.plan.cfg
    return StreamedEngine(
        stream.plan.files,
        cfg.target,
        stream.plan.contract.wiring,
        cfg.last_hidden_states,
        stream.memory.sizes,
        cfg.stream.read_threads,
        scratch_folder(cfg),
        stream.skeleton,
    )


def check_engine(stream: StreamPlan, engine: StreamedEngine) -> None:
    """Small weights are read, and the self-check runs, before anything is written."""
    raise_problems(check_vectors(engine.skeleton.all_recipes()), f"cannot use {stream.plan.files.folder}")
    samples = stream.plan.samples
    ids, batch = Each(samples, lambda sample: sample.id), Each(samples, lambda sample: sample.input_ids)
    with explained_loading(stream.plan.files.folder):  # a config that contradicts itself fails here, in any way
        self_check_streamed(engine, ids, batch, stream.plan.layout.value_dtype)


def _is_done(stream: StreamPlan) -> bool:
    """Whether this process's shards, and the target head, are there and sound."""
    if not stream.share:
        return True
    folder, manifest = stream.plan.folder, begun_manifest(stream.plan)
    if manifest is None:
        return False
    mine = {shard_name(shard.number) for chunk in stream.share for shard in chunk.shards}
    sound = {shard.file for shard in manifest.shards if not check_shard(folder, shard, manifest.layout)}
    return mine <= sound and not check_target_head(folder, manifest)


def _open_store(given: ExtractPlan, stream: StreamPlan, engine: StreamedEngine) -> JointStore:
    """Begins the store with this machine's sizes, or goes on with one, whose sizes are taken where none are `given`."""
    plan = stream.plan
    return JointStore(
        plan.folder,
        plan.contract,
        lambda begun: plan.settings if begun is None else settle_sizes(given, begun).settings,
        plan.files.text_config,
        engine.head_tensors(),
        origin(given.cfg),
        stream.process.index,
        stream.process.count,
        plan.layout.last_rows,
    )


def _walk_share(stream: StreamPlan, engine: StreamedEngine, store: JointStore) -> int:
    """Walks this process's chunks that lack a shard; returns how many samples were added."""
    work = missing_shards(stream.share, store.manifest())
    process, stage, most_waiting = stream.process, stager(engine.device), blocks_waiting()
    label = "extract" if process.count == 1 else f"extract ({process.index} of {process.count})"
    with (
        progress(label, sum(stream.tokens(chunk) for chunk, _ in work), "tokens") as advance,
        _Listing(store) as listing,
    ):
        for chunk, shards in work:
            batch = [stream.plan.samples[index].input_ids for index in chunk.samples]
            with (
                walked(stream, chunk, shards) as (parts, rows),
                ShardSink(parts, stream.plan.layout, stage, engine.target_head, rows, most_waiting) as sink,
                explained_memory(),
            ):
                engine.walk(batch, sink, whole_steps(advance, sink.check, listing.check))
            listing.add([part.file for part in parts], None if rows is None else rows.fingerprint())
    return sum(len(shard.samples) for _, shards in work for shard in shards)


@contextmanager
def walked(
    stream: StreamPlan, chunk: Chunk, shards: Sequence[Shard]
) -> Iterator[tuple[list[Part], FingerprintRows | None]]:
    """Opens these shards of the chunk, and closes them if the walk succeeds; else nothing of them is left."""
    plan, parts, rows = stream.plan, [], None
    lengths = [sum(plan.sample_tokens[index][1] for index in shard.samples) for shard in chunk.shards]
    try:
        for shard, length, end in zip(chunk.shards, lengths, accumulate(lengths), strict=True):
            if shard not in shards:
                continue
            samples = [plan.samples[index] for index in shard.samples]
            file = ShardFile(plan.folder / shard_name(shard.number), samples, plan.layout)
            parts.append(Part(end - length, end, file))
            if shard.number == 0:
                place = fingerprint_place(samples, plan.layout)
                begin = sum(len(sample.input_ids) for sample in samples[: place.index])
                rows = FingerprintRows(place, begin, plan.contract)
        yield parts, rows
        for part in parts:
            part.file.close()
    except BaseException:  # Ctrl-C too: the files have their whole size, but not their rows; raised again
        for part in parts:
            part.file.discard()
        raise


class _Listing:
    """Makes the checksums of finished shards and lists them, in the background. A context manager."""

    def __init__(self, store: JointStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="listing")
        self._pending: Future[None] | None = None

    def add(self, files: Sequence[ShardFile], fingerprint: Fingerprint | None) -> None:
        """Takes a chunk's shards, when those of the one before are listed.

        Raises:
            ProblemsError: those could not be.
        """
        self._wait()
        self._pending = self._pool.submit(self._list, files, fingerprint)
        if fingerprint is not None:  # it is in no file: with it, the chunk must not wait for the next one
            self._wait()

    def check(self) -> None:
        """Raises what went wrong, if anything did so far."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _list(self, files: Sequence[ShardFile], fingerprint: Fingerprint | None) -> None:
        with ThreadPoolExecutor(HASHERS, thread_name_prefix="checksum") as pool:
            entries = list(pool.map(lambda file: shard_entry(file.path, file.samples), files))
        self._store.commit(entries, fingerprint)


def _adopt(stream: StreamPlan, store: JointStore) -> None:
    """Lists this process's shards that an earlier run finished and was killed before it listed them."""
    plan = stream.plan
    whole = []
    for _, shards in missing_shards(stream.share, store.manifest()):
        for shard in shards:
            path = plan.folder / shard_name(shard.number)
            samples = [plan.samples[index] for index in shard.samples]
            if shard.number and path.exists() and _fits(path, [sample_info(item) for item in samples], plan):
                whole.append(shard_entry(path, samples))
    if whole:
        say(f"{len(whole)} shards were whole, but not listed yet")
        store.commit(whole)


def _fits(path: Path, infos: Sequence[Any], plan: ExtractPlan) -> bool:
    return not check_shard(path.parent, ShardInfo(path.name, path.stat().st_size, "", tuple(infos)), plan.layout)


def _lacking(stream: StreamPlan) -> list[str]:
    """What every process has yet to do."""
    manifest = begun_manifest(stream.plan)
    left = {index: missing_shards(chunks, manifest) for index, chunks in enumerate(stream.shares)}
    return [
        f"process {index}: {len(work):,} chunks, {sum(stream.tokens(chunk) for chunk, _ in work):,} tokens"
        for index, work in left.items()
        if work
    ]


def whole_steps(advance: Callable[[int], None], *checks: Callable[[], None]) -> Callable[[float], None]:
    """Hands a walk's fractions of tokens on as whole ones, and lets what goes on beside it raise."""
    done, shown = 0.0, 0

    def step(tokens: float) -> None:
        nonlocal done, shown
        for check in checks:
            check()
        done += tokens
        advance(round(done) - shown)
        shown = round(done)

    return step


def say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)

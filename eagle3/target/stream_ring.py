"""`eagle3 extract --stream` with the streamed engine: a chunk at a time, into a ring that has room for all of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from eagle3.data.ring_folder import check_ring_output
from eagle3.data.ring_format import RING_FILE, RingPlan, RingShard, load_ring
from eagle3.data.ring_writer import RingWriter
from eagle3.errors import raise_problems
from eagle3.files import sha256_file
from eagle3.progress import progress
from eagle3.target.engines.streamed import StreamedEngine
from eagle3.target.plan import ExtractPlan
from eagle3.target.ring_extract import RingReport, check_ring, open_ring, plan_ring, ring_report
from eagle3.target.shares import Chunk, Shard
from eagle3.target.stream_extract import HASHERS, check_engine, make_engine, say, walked, whole_steps
from eagle3.target.stream_plan import StreamPlan, make_stream_plan, settle_sizes
from eagle3.target.stream_sink import ShardSink, blocks_waiting, stager
from eagle3.target.streaming.memory import explained_memory


def extract_streamed_ring(plan: ExtractPlan) -> RingReport:
    """Fills the ring until all of its epochs are made, or its trainer needs no more.

    Raises:
        ProblemsError: as `extract_streamed`; the ring cannot hold a chunk.
    """
    stream, ring = plan_streamed_ring(plan)
    say(*stream.memory.lines())
    check_ring(stream.plan, ring)
    with closing(make_engine(stream)) as engine:
        check_engine(stream, engine)
        with (
            open_ring(stream.plan, ring, engine.head_tensors()) as writer,
            progress("extract", writer.tokens_left(), "tokens") as advance,
        ):
            while numbers := writer.next_unit():
                _walk_unit(stream, engine, writer, numbers, advance)
    return ring_report(stream.plan, writer)


def plan_streamed_ring(plan: ExtractPlan) -> tuple[StreamPlan, RingPlan]:
    """The sizes, those of the ring where it is begun, and the ring.

    Raises:
        ProblemsError: as `make_stream_plan` and `plan_ring`; the folder is somebody else's.
    """
    raise_problems(check_ring_output(plan.folder))
    begun = load_ring(plan.folder).settings if (plan.folder / RING_FILE).exists() else None
    stream = make_stream_plan(settle_sizes(plan, begun), None)
    return stream, plan_ring(stream.plan, stream.memory.sizes.chunk_tokens)


def _walk_unit(
    stream: StreamPlan, engine: StreamedEngine, writer: RingWriter, numbers: list[int], advance: Callable[..., None]
) -> None:
    """Walks the chunk that these shards are of, all of it: its states are the same whichever shards are lacking."""
    ring, plan = writer.ring, stream.plan
    members = [Shard(number, shard.samples) for number, shard in _unit(ring, numbers[0])]
    chunk = Chunk(ring.shards[numbers[0]].unit, tuple(members))
    wanted = [shard for shard in members if shard.number in numbers]
    batch = [plan.samples[index].input_ids for index in chunk.samples]
    with (
        walked(stream, chunk, wanted) as (parts, rows),
        ShardSink(parts, plan.layout, stager(engine.device), engine.target_head, rows, blocks_waiting()) as sink,
        explained_memory(),
    ):
        engine.walk(batch, sink, whole_steps(advance, sink.check))
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="checksum") as pool:
        checksums = pool.map(sha256_file, [part.file.path for part in parts])
        listed = dict(zip((shard.number for shard in wanted), checksums, strict=True))
    writer.list_shards(listed, None if rows is None else rows.fingerprint())


def _unit(ring: RingPlan, number: int) -> list[tuple[int, RingShard]]:
    unit = ring.shards[number].unit
    return [(number, shard) for number, shard in enumerate(ring.shards) if shard.unit == unit]

"""`eagle3 extract --from` that only copies, by several processes: each copies every count-th shard, and all together
make the store that one process makes.
"""

from __future__ import annotations

from collections.abc import Sequence

from safetensors.torch import load_file

from eagle3.data.store import StoreReader
from eagle3.data.store_fingerprint import make_fingerprint
from eagle3.data.store_format import TARGET_HEAD_FILE, Manifest, ShardInfo, shard_name
from eagle3.data.store_joint import JointStore
from eagle3.data.store_sample import shard_content
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.progress import progress
from eagle3.target.capture import shards_by_size
from eagle3.target.plan import ExtractPlan
from eagle3.target.reuse import copier
from eagle3.target.shares import Process
from eagle3.target.stream_plan import begun_manifest
from eagle3.target.write import collect, completing, origin

_Shards = Sequence[tuple[int, Sequence[int]]]
"""Number and samples of each."""


def copy_jointly(plan: ExtractPlan, reader: StoreReader, process: Process) -> tuple[int, list[str]]:
    """Copies this process's shards of what the new store lacks.

    Returns:
        how many samples it added, and a line for each process whose share is not there yet.

    Raises:
        ProblemsError: as `JointStore`; the store that is copied from is damaged; the disk is full.
    """
    cfg, make = plan.cfg, copier(plan, reader)
    shards = list(enumerate(shards_by_size(plan.sizes, cfg.shard_max_bytes, cfg.shard_max_samples)))
    head = load_file(reader.folder / TARGET_HEAD_FILE)
    complete = completing(plan, head)
    with JointStore(
        plan.folder,
        plan.contract,
        lambda begun: plan.settings,
        plan.files.text_config,
        head,
        origin(cfg),
        process.index,
        process.count,
        plan.layout.last_rows,
    ) as store:
        missing = _missing(shards[process.index :: process.count], store.manifest())
        tokens = sum(plan.sample_tokens[index][1] for _, indices in missing for index in indices)
        with progress(f"copy ({process.index} of {process.count})", tokens, "tokens") as advance:
            for number, indices in missing:
                samples = collect(make, indices, advance, complete)
                path = plan.folder / shard_name(number)
                checksum = write_tensor_file_atomic(path, *shard_content(samples, plan.layout))
                entry = ShardInfo(path.name, path.stat().st_size, checksum, tuple(sample.info for sample in samples))
                store.commit([entry], make_fingerprint(samples, plan.layout) if number == 0 else None)
    return sum(len(indices) for _, indices in missing), _lacking(plan, shards, process.count)


def _missing(shards: _Shards, manifest: Manifest | None) -> _Shards:
    listed = {shard.file for shard in manifest.shards} if manifest else set()
    return [shard for shard in shards if shard_name(shard[0]) not in listed]


def _lacking(plan: ExtractPlan, shards: _Shards, count: int) -> list[str]:
    left = {index: _missing(shards[index::count], begun_manifest(plan)) for index in range(count)}
    return [f"process {index}: {len(missing):,} shards" for index, missing in left.items() if missing]

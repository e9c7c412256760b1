"""How fast training batches come from a store, against reading the same bytes plainly.

    python benchmarks/store.py --folder /fast/disk      a store of Kimi-K2.5's width, 5 GB
    python benchmarks/store.py --shape small            in a second: shows that it still runs

Prints a JSON line for each pass over the store: `plain` reads every shard with as many threads in large blocks, each
into one buffer again and again, which stays in the processor's cache; `plain into memory` does so into two buffers of a
batch's size by turns, as batches must be; `batches` is what the trainer iterates over (packed rows, shuffled, in pinned
memory where there is a GPU), read by threads; `batches by processes` are the same, made by as many processes of a
`DataLoader` with a thread each and sent through shared memory (which must hold two batches a process; the first pass
starts them); `open` is opening a store of many small shards. The page cache is dropped before each pass where the
system lets a program do that, unless `--warm`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from eagle3.data.batch_plan import BatchPlan
from eagle3.data.dealing import Window
from eagle3.data.loader import load_windows
from eagle3.data.store import StoredSample, StoreReader, StoreWriter
from eagle3.data.store_format import ShardInfo, load_manifest, save_manifest, shard_name
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.store_sample import shard_content
from eagle3.data.tensor_file import write_tensor_file
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import DTYPE_CODES

SHAPES = {"kimi": (7168, 163840, 2048, 72), "small": (64, 512, 64, 12)}
BLOCK = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--folder", type=Path, help="where the store is made; default: a temporary folder")
    parser.add_argument("--row", type=int, help="tokens of a packed row; default: twice a sample's longest")
    parser.add_argument("--dtype", choices=DTYPE_CODES, default="bfloat16")
    parser.add_argument("--last-rows", choices=get_args(LastRows), default="supervised")
    parser.add_argument("--threads", type=int, default=8, help="that read at a time, or processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shards", type=int, default=20_000, help="of the store that is only opened (small: 200)")
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary) / "store"
        write(folder, StoreLayout(contract(args.shape, args.dtype), args.last_rows), args.shape)
        size = sum(path.stat().st_size for path in folder.glob("shard-*"))
        tokens = sum(item.tokens for item in StoreReader(folder).samples)
        said = {"gb": round(size / 1e9, 3), "bytes_per_token": round(size / tokens), "torch": torch.__version__}
        print(json.dumps({"what": "written", **said}), flush=True)
        passes = {"plain": plain, "plain into memory": partial(plain, into_memory=True), "batches": batches}
        passes["batches by processes"] = ByProcesses(folder, args)
        rates = {what: measure(what, work, folder, args) for what, work in passes.items()}
        for made in ("batches", "batches by processes"):
            for what in ("plain", "plain into memory"):
                share = round(rates[made] / rates[what], 3)
                print(json.dumps({"what": f"{made} as a share of {what}", "value": share}), flush=True)
        opening(Path(temporary) / "many", 200 if args.shape == "small" else args.shards)


def write(folder: Path, layout: StoreLayout, shape: str, samples: int | None = None, each: int = 4) -> None:
    """Random samples of half to the whole length, 40% of the tokens supervised."""
    hidden, vocab, longest, count = SHAPES[shape]
    torch.manual_seed(0)
    head = {"embed_tokens.weight": torch.zeros(vocab, hidden, dtype=torch.bfloat16), "norm.weight": torch.ones(hidden)}
    config = {"rms_norm_eps": 1e-5}
    with StoreWriter(folder, layout.contract, {}, config, head, last_rows=layout.last_rows) as writer:
        for begin in range(0, samples or count, each):
            numbers = range(begin, min(begin + each, samples or count))
            tokens = [longest // 2 + number * 37 % (longest // 2) for number in numbers]
            writer.write_shard([sample(*item, hidden, vocab) for item in zip(numbers, tokens, strict=True)])


def contract(shape: str, dtype: str = "bfloat16") -> WiringContract:
    hidden, vocab, _, _ = SHAPES[shape]
    digests = [f"sha256:{digit * 64}" for digit in "123"]
    return WiringContract(
        target_name="random",
        target_family="llama",
        target_config_digest=digests[0],
        num_hidden_layers=61,
        hidden_size=hidden,
        vocab_size=vocab,
        output_indices=(2, 30, 58),
        last_hidden_states="post_norm",
        dtype=dtype,
        tokenizer_digest=digests[1],
        chat_template_digest=digests[2],
    )


def sample(number: int, tokens: int, hidden: int, vocab: int) -> StoredSample:
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[tokens * 3 // 5 :] = True
    return StoredSample(
        id=f"s{number}",
        input_ids=torch.randint(0, vocab, (tokens,), dtype=torch.int32),
        loss_mask=mask,
        aux_hidden_states=torch.randn(tokens, 3 * hidden).to(torch.bfloat16),
        last_hidden_states=torch.randn(tokens, hidden).to(torch.bfloat16),
        target_argmax=torch.zeros(tokens, dtype=torch.int32),  # of a head of zeros
    )


def measure(what: str, work: Any, folder: Path, args: argparse.Namespace) -> float:
    """Bytes/s, the median of some passes."""
    rates, size = [], 0
    for number in range(args.repeats):
        if not args.warm:
            drop_cache(folder)
        begin = time.perf_counter()
        size = work(folder, args, number)
        rates.append(size / (time.perf_counter() - begin))
    middle = statistics.median(rates)
    values = {"gb_per_second": middle / 1e9, "spread": (max(rates) - min(rates)) / middle, "gb": size / 1e9}
    print(json.dumps({"what": what, **{key: round(value, 3) for key, value in values.items()}}), flush=True)
    return middle


def plain(folder: Path, args: argparse.Namespace, number: int, into_memory: bool = False) -> int:
    """Every byte of every shard, a block at a time, into a buffer a thread or into as many as two batches have."""
    pin, count = torch.cuda.is_available(), args.threads
    if into_memory:
        manifest = load_manifest(folder)
        row = args.row or 2 * SHAPES[args.shape][2]
        count = max(2 * manifest.layout.tensor_bytes(row, 2 * row // 5) // BLOCK, args.threads)
    memory = torch.empty(count * BLOCK, dtype=torch.uint8, pin_memory=pin).numpy().data
    buffers = [memory[at : at + BLOCK] for at in range(0, len(memory), BLOCK)]

    def read(job: tuple[int, int, int]) -> int:
        descriptor, begin, place = job
        return os.preadv(descriptor, [buffers[place]], begin)

    total = done = 0
    with ThreadPoolExecutor(args.threads) as pool:
        for path in sorted(folder.glob("shard-*")):
            descriptor = os.open(path, os.O_RDONLY)
            begins = range(0, path.stat().st_size, BLOCK)
            jobs = [(descriptor, at, (done + place) % count) for place, at in enumerate(begins)]
            total += sum(pool.map(read, jobs))
            done += len(jobs)
            os.close(descriptor)
    return total


def batches(folder: Path, args: argparse.Namespace, number: int) -> int:
    """The trainer's batches of one epoch."""
    reader, windows, row = epoch(folder, args, number)
    for window in load_windows(reader, windows, range(len(reader)), row, threads=args.threads):
        del window
    return bytes_read(reader)


class ByProcesses(Dataset[list[dict[str, Any]]]):
    """The same batches, by processes that the first pass starts. A place is a pass and a window of its epoch."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.epochs = [epoch(folder, args, number) for number in range(args.repeats)]
        self.places: list[tuple[int, int]] = []
        self.loader = DataLoader(
            self,
            batch_size=None,
            sampler=self.places,
            num_workers=args.threads,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=without_gpu,
        )

    def __call__(self, folder: Path, args: argparse.Namespace, number: int) -> int:
        reader, windows, _ = self.epochs[number]
        self.places[:] = [(number, place) for place in range(len(windows))]
        for window in self.loader:
            del window
        return bytes_read(reader)

    def __getitem__(self, place: tuple[int, int]) -> list[dict[str, Any]]:
        reader, windows, row = self.epochs[place[0]]
        [made] = load_windows(reader, [windows[place[1]]], range(len(reader)), row, threads=1)
        return [vars(batch) for batch in made]


def without_gpu(worker: int) -> None:
    """A forked process cannot pin memory: its parent does so with what it gets."""
    torch.cuda.is_available = lambda: False


def epoch(folder: Path, args: argparse.Namespace, number: int) -> tuple[StoreReader, list[Window], int]:
    """The store, an epoch's windows and the tokens of a row."""
    reader, row = StoreReader(folder), args.row or 2 * SHAPES[args.shape][2]
    return reader, BatchPlan(0, [item.tokens for item in reader.samples], row, pack=True).epoch(number), row


def bytes_read(reader: StoreReader) -> int:
    read = replace(reader.layout, last_rows="supervised")  # other rows are not read, whatever is there
    return sum(read.tensor_bytes(item.tokens, item.supervised) for item in reader.samples)


def opening(folder: Path, shards: int) -> None:
    """Seconds to open a store of so many shards, each of one sample of four tokens."""
    write(folder, StoreLayout(contract("small")), "small", samples=1)
    manifest, (hidden, vocab, _, _) = load_manifest(folder), SHAPES["small"]
    entries = list(manifest.shards)
    for number in range(1, shards):
        one, path = sample(number, 4, hidden, vocab), folder / shard_name(number)
        digest = write_tensor_file(path, *shard_content([one], manifest.layout))
        entries.append(ShardInfo(path.name, path.stat().st_size, digest, (one.info,)))
    save_manifest(folder, replace(manifest, shards=tuple(entries)))
    begin = time.perf_counter()
    assert len(StoreReader(folder)) == shards
    print(json.dumps({"what": "open", "shards": shards, "seconds": round(time.perf_counter() - begin, 3)}), flush=True)


def drop_cache(folder: Path) -> None:
    for path in folder.glob("shard-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()

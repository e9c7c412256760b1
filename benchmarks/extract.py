"""How fast the streamed engine walks full-width Kimi-K2.5 layers, on weights written on the spot.

    python benchmarks/extract.py                      on a GPU: three layers (one dense, two of experts), 20 GB of files
    python benchmarks/extract.py --shape small        on a CPU, in seconds: shows that it still runs

Prints one JSON line per measurement:

- `limits`: what the card's grouped and plain matrix products reach at these shapes, with the routing of the data;
- `moe`: a whole block of experts (routing, gather, products, SwiGLU, scatter, shared expert) against that limit, and
  Transformers' own block with its grouped product;
- `walk`: a chunk through the layers as extraction walks them, the expert layers repeated so that reading is in steady
  state; tokens/s projected to 61 layers; share of time spent waiting for weights; peak memory;
- `store`: `eagle3 extract` itself on these three layers, all of them captured, so that as many states are written as of
  the whole target; seconds of a chunk against those of its walk alone;
- `offload`: accelerate's CPU offload of the same layers (bfloat16) at the largest batch that fits.

The projection: tokens / (seconds of the dense layer + 60 times the mean of the expert layers, unpacking included, +
their waits). It leaves out the embedding, copying captured states to the host, writing and hashing shards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kimi_layers import LAYERS, write_layers
from eagle3.config import ExtractConfig, StreamSection, TargetConfig, build_config
from eagle3.target.engines.streamed import StreamedEngine, StreamSizes
from eagle3.target.extract import run_extract
from eagle3.target.resolve import TargetFiles, find_target
from eagle3.target.streaming import moe
from eagle3.target.streaming.memory import plan_memory
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.streaming.walk import WalkTimes
from eagle3.target.tiny import CHATML_TEMPLATE, CHATML_TOKENS, make_tokenizer
from eagle3.wiring.layers import LayerWiring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("kimi", "small"), default="kimi")
    parser.add_argument("--folder", type=Path, help="where the weights are written; default: a temporary folder")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk; default: 524,288 (small: 512)")
    parser.add_argument("--micro", type=int, help="tokens in a call of a layer; default: 65,536 (small: 128)")
    parser.add_argument("--documents", type=int, nargs="+", help="tokens of a document; default: 2048 8192 (small: 32)")
    parser.add_argument("--layers", type=int, default=7, help="layers of a walk; expert layers repeat")
    parser.add_argument("--threads", type=int, default=8, help="threads that read")
    parser.add_argument("--group", type=int, help="experts unpacked at a time; default: all")
    parser.add_argument("--residual", choices=("device", "host", "file"), default="device")
    parser.add_argument("--profile", action="store_true", help="print where the time of an expert layer goes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["moe", "walk", "store", "offload"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    small = args.shape == "small"
    args.chunk = args.chunk or (512 if small else 524288)
    args.micro = args.micro or (128 if small else 65536)
    args.documents = args.documents or ([32] if small else [2048, 8192])
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)) / "layers"
        begin = time.perf_counter()
        if not folder.exists():
            write_layers(folder, args.shape, 3, device)
        _print("written", seconds=time.perf_counter() - begin, torch=torch.__version__, device=_name(device))
        run(args, folder, device)


def run(args: argparse.Namespace, folder: Path, device: torch.device) -> None:
    target = TargetConfig(path=str(folder), device=str(device), dtype="bfloat16")
    files = find_target(target)
    sizes = StreamSizes(args.chunk, args.micro, args.residual, args.group)
    _print("planned", gib=planned(args, files, device))
    engine = StreamedEngine(files, target, LayerWiring((0, 1, 2), 3), "post_norm", sizes, args.threads)
    walks = {}
    if "walk" in args.parts or "moe" in args.parts:
        for document in args.documents:
            walks[document] = measure_walk(args, engine, document, device)
            if args.profile:
                profile(args, engine, document)
    if "moe" in args.parts:
        measure_moe(args, engine, device)
    alone = walk_alone(args, engine) if "store" in args.parts else 0.0
    engine.close()
    del engine
    free(device)
    if "store" in args.parts:
        measure_store(args, files, alone, device)
    if "offload" in args.parts:
        free(device)
        ours = walks.get(args.documents[0], 0.0)
        measure_offload(args, files, args.documents[0], ours, device)


def measure_walk(args: argparse.Namespace, engine: StreamedEngine, document: int, device: torch.device) -> float:
    """Tokens/s of a whole walk, projected."""
    batch = documents(args.chunk, document, engine)
    sink = Nothing()
    order = [0, *(1 + place % 2 for place in range(args.layers - 1))]
    engine.layer_walk.run(
        documents(args.micro, document, engine), sink, lambda _: None, order[:3]
    )  # compiles, warms the cache
    free(device)
    runs: list[WalkTimes] = []
    began = engine.layer_walk.reader.bytes_read
    begin = time.perf_counter()
    for _ in range(args.repeats):
        runs.append(engine.layer_walk.run(batch, sink, lambda _: None, order))
    whole = time.perf_counter() - begin
    read = engine.layer_walk.reader.bytes_read - began
    rates = [rate(args.chunk, times) for times in runs]
    expert = [seconds for times in runs for seconds in times.layers[1:]]
    waits = [seconds for times in runs for seconds in times.waits[1:]]
    _print(
        "walk",
        document=document,
        chunk=args.chunk,
        tokens_per_second=statistics.median(rates),
        spread=(max(rates) - min(rates)) / statistics.median(rates),
        dense_layer=statistics.median(times.layers[0] for times in runs),
        expert_layer=statistics.median(expert),
        waiting=sum(waits) / (sum(waits) + sum(expert)),
        read_gb_per_second=read / whole / 1e9,
        peak_gib=peak(device),
    )
    return statistics.median(rates)


def planned(args: argparse.Namespace, files: TargetFiles, device: torch.device) -> float:
    """GiB that extraction would announce for these sizes; asked before anything is on the device."""
    section = StreamSection(
        chunk_tokens=args.chunk,
        micro_tokens=args.micro,
        residual=args.residual,
        expert_group=args.group,
        read_threads=args.threads,
        device_memory_gib=1000.0,
    )
    skeleton = Skeleton(files, torch.bfloat16, files.facts.num_hidden_layers)
    return plan_memory(skeleton, section, max(args.documents), device, files.folder).device_bytes / 2**30


def profile(args: argparse.Namespace, engine: StreamedEngine, document: int) -> None:
    """Milliseconds of an expert layer for one micro-batch, by kernel, the largest first."""
    batch = documents(args.micro, document, engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        engine.layer_walk.run(batch, Nothing(), lambda _: None, [1])
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    _print(
        "profile", document=document, **{event.key[:70]: event.self_device_time_total / 1000 for event in events[:22]}
    )


def rate(tokens: int, times: WalkTimes) -> float:
    experts = [layer + wait for layer, wait in zip(times.layers[1:], times.waits[1:], strict=True)]
    return tokens / (times.layers[0] + (LAYERS - 1) * statistics.mean(experts))


def measure_moe(args: argparse.Namespace, engine: StreamedEngine, device: torch.device) -> None:
    """The block of experts of layer 1 on one micro-batch of normed states."""
    walk = engine.layer_walk
    layer = engine.skeleton.layers[1]
    walk.load(1)
    hidden = engine.skeleton.files.facts.hidden_size
    states = torch.randn(1, args.micro, hidden, device=device, dtype=torch.bfloat16)
    block: Any = layer.mlp
    config = block.experts.gate_up_proj.shape
    gate_up, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
    with torch.inference_mode():
        _, _, index = block.gate(states[0])
        routing = moe.route(index, config[0])
        products = {"gate_up": gate_up, "down": down}
        for name, weights in products.items():
            rows = torch.randn(len(routing.source), weights.shape[2], device=device, dtype=torch.bfloat16)
            products[name] = seconds(args, device, partial(moe._grouped, rows, weights, routing.ends))
            del rows
        routed = 2 * args.micro * index.shape[1] * hidden * 3 * (config[1] // 2)
        limit = routed / sum(products.values())
        free(device)
        whole = seconds(args, device, lambda: block(states))
        operations = routed + 2 * args.micro * hidden * (3 * block.shared_experts.intermediate_size + config[0])
        _print(
            "moe",
            tokens=args.micro,
            block_seconds=whole,
            block_tflops=operations / whole / 1e12,
            limit_tflops=limit / 1e12,
            limit_gate_up=routed * 2 / 3 / products["gate_up"] / 1e12,
            limit_down=routed / 3 / products["down"] / 1e12,
            share_of_limit=operations / whole / limit,
        )
        for module in block.modules():
            module.__dict__.pop("forward", None)
        engine.skeleton.model.config._experts_implementation = "grouped_mm"
        own = seconds(args, device, lambda: block(states))
        _print("moe transformers", tokens=args.micro, block_seconds=own, share_of_limit=operations / own / limit)


def walk_alone(args: argparse.Namespace, engine: StreamedEngine) -> float:
    """Seconds that a chunk takes through all three layers, from the moment that the first one's weights are there."""
    batch = documents(args.chunk, args.documents[0], engine)
    times = engine.layer_walk.run(batch, Nothing(), _ignore, [0, 1, 2])
    return sum(times.layers) + sum(times.waits[1:])


def measure_store(args: argparse.Namespace, files: TargetFiles, alone: float, device: torch.device) -> None:
    """Seconds of a chunk whose states are stored: from extractions of one and of three chunks."""
    folder, document = files.folder, args.documents[0]
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    make_tokenizer(CHATML_TOKENS, 512, CHATML_TEMPLATE, **roles).save_pretrained(folder)
    spans = []
    for chunks in (1, 3):
        data = folder.parent / f"{chunks}.jsonl"
        with open(data, "w") as handle:
            for number in range(chunks * args.chunk // document):
                turns = (("user", f"{number}"), ("assistant", "the sea " * document))
                messages = [{"role": role, "content": content} for role, content in turns]
                handle.write(json.dumps({"id": str(number), "messages": messages}) + "\n")
        settings = {
            "target": {"path": str(folder), "device": str(device), "dtype": "bfloat16"},
            "data": {"path": str(data), "max_length": document},
            "output": str(folder.parent / f"store-{chunks}"),
            "output_indices": [0, 1, 2],
            "engine": "streamed",
            "stream": {"chunk_tokens": args.chunk, "micro_tokens": args.micro, "read_threads": args.threads},
        }
        begin = time.perf_counter()
        run_extract(build_config(ExtractConfig, settings, "benchmark"))
        spans.append(time.perf_counter() - begin)
        written = sum(path.stat().st_size for path in Path(settings["output"]).glob("shard-*"))  # type: ignore[arg-type]
        shutil.rmtree(str(settings["output"]))
        free(device)
    chunk = (spans[1] - spans[0]) / 2
    _print("store", chunk=args.chunk, walk=alone, chunk_seconds=chunk, first=spans[0], gb_per_chunk=written / 3e9)


def _ignore(_: float) -> None:
    pass


def measure_offload(
    args: argparse.Namespace, files: TargetFiles, document: int, ours: float, device: torch.device
) -> None:
    """accelerate's CPU offload of the same three layers in bfloat16, every weight in host memory."""
    from accelerate import cpu_offload

    model = files.spec.empty(files.folder, torch.bfloat16)
    config = model.config
    model.set_attn_implementation("sdpa")
    model.config._experts_implementation = "grouped_mm" if device.type == "cuda" else "eager"
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data.normal_()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    base = model.model
    if device.type == "cuda":
        cpu_offload(base, execution_device=device)
    for layer in base.layers:
        layer.register_forward_hook(mark)
    base.layers[0].register_forward_pre_hook(mark)
    tokens = args.chunk
    while tokens >= document:
        ids = torch.randint(0, config.vocab_size, (tokens // document, document), device=device)
        try:
            marks.clear()
            with torch.inference_mode():
                base(input_ids=ids, use_cache=False)
        except torch.OutOfMemoryError:
            free(device)
            tokens //= 2
            continue
        spans = [end - begin for begin, end in pairwise(marks)]
        found = tokens / (spans[0] + (LAYERS - 1) * statistics.mean(spans[1:]))
        _print("offload", tokens=tokens, document=document, layers=spans, tokens_per_second=found, times=ours / found)
        return


class Nothing:
    """Takes no states."""

    keys: frozenset[Any] = frozenset()

    def put(self, key: Any, begin: int, states: torch.Tensor) -> None:
        raise AssertionError(key)


def documents(tokens: int, length: int, engine: StreamedEngine) -> list[list[int]]:
    vocab = engine.skeleton.files.facts.vocab_size
    generator = torch.Generator().manual_seed(0)
    count = max(tokens // length, 1)
    rows: list[list[int]] = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return rows


def seconds(args: argparse.Namespace, device: torch.device, work: Callable[[], Any]) -> float:
    """Median of some runs after one that warms up."""

    def once() -> Iterator[float]:
        for _ in range(1 + max(args.repeats, 5)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            yield time.perf_counter() - begin

    return statistics.median(list(once())[1:])


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _print(what: str, **values: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


if __name__ == "__main__":
    main()

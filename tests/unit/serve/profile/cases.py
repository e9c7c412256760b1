"""Traces built from first principles: what they are split into is known exactly.

One decode cycle takes 1000 microseconds on the GPU:

    0-40, 42-100 draft graph     130-500 verify graph          850-900 draft extend graph
    110-120 tree laid out        500-600 all-reduce in it      905-915 its argmax
                                 600-800 verify graph          920-925 copy of the results
                                 810-830 argmax, 830-840 acceptance
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

CYCLE = 1000.0
EXPECTED = {
    "draft": 108 + 2,  # the gap between two kernels of one graph is the graph's
    "verify": 570,
    "sampling": 30,
    "draft_extend": 60,
    "communication": 100,
    "between": 5,
    "idle": 10 + 10 + 10 + 10 + 5 + 5 + 75,
    "unattributed": 0,
}
IDLE_BEFORE = {"draft": 10 + 75, "verify": 10, "sampling": 10, "draft_extend": 10 + 5, "between": 5}
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


class TraceBuilder:
    """Attributes:
    lead: how far the CPU is ahead of the GPU.
    """

    def __init__(self, lead: float = 900.0, origin: float = 5_000_000.0) -> None:
        self.lead = lead
        self.origin = origin
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        self.facts: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0}]}
        self._correlation = 0

    def x(self, cat: str, name: str, start: float, length: float, tid: Any = 1, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": self.origin + start, "dur": length,
             "args": args}
        )  # fmt: skip

    def span(self, start: float, end: float, name: str, tid: Any = 1) -> None:
        """A range on the CPU, given in the GPU's time: it is `lead` earlier."""
        self.x("user_annotation", name, start - self.lead, end - start, tid)

    def launch(self, at: float, *kernels: tuple[float, float, str], graph: bool = False, stream: int = 7) -> int:
        """Kernels (start, end, name) that one call at `at` (GPU time, less `lead`) launches."""
        self._correlation += 1
        call = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
        self.x("cuda_runtime", call, at - self.lead, 1.0, correlation=self._correlation)
        for start, end, name in kernels:
            self.x("kernel", name, start, end - start, stream, correlation=self._correlation, stream=stream)
        return self._correlation

    def cycle(
        self,
        at: float,
        batch: int = 1,
        scale: float = 1.0,
        nccl: float = 100.0,
        ranges: bool = True,
        graphs: bool = True,
    ) -> float:
        """Adds a cycle that begins at `at` (GPU time); returns where the next one begins."""

        def t(offset: float) -> float:
            return at + offset * scale

        if ranges:
            self.span(t(-5), t(125), "draft")
            self.span(t(127), t(805), f"step[TARGET_VERIFY bs={batch}]")
            self.span(t(845), t(918), "draft_extend")
        self._launch_all(graphs, t(-2), (t(0), t(40), "draft_gemm"), (t(42), t(100), "draft_gemm"))
        self.launch(t(108), (t(110), t(120), "build_tree_efficient<int>"))
        reduced = t(600) - (100 - nccl) * scale
        self._launch_all(
            graphs,
            t(128),
            (t(130), t(500), "target_gemm"),
            (t(500), reduced, NCCL),
            (t(600), t(700), "target_gemm"),
            (t(700), t(800), "target_gemm"),
        )
        self.launch(t(808), (t(810), t(830), "reduce_argmax"))
        self.launch(t(828), (t(830), t(840), "VerifyTreeGreedyKernel"))
        self._launch_all(graphs, t(848), (t(850), t(880), "extend_gemm"), (t(880), t(900), "extend_gemm"))
        self.launch(t(903), (t(905), t(915), "reduce_argmax"))
        self._correlation += 1
        self.x("cuda_runtime", "cudaMemcpyAsync", t(919) - self.lead, 1.0, correlation=self._correlation)
        self.x("gpu_memcpy", "Memcpy DtoH", t(920), 5 * scale, 9, correlation=self._correlation)
        return t(CYCLE)

    def _launch_all(self, graphs: bool, at: float, *kernels: tuple[float, float, str]) -> None:
        if graphs:
            self.launch(at, *kernels, graph=True)
        else:
            for kernel in kernels:
                self.launch(at, kernel)

    def prefill(self, at: float, ranges: bool = True) -> float:
        """A prefill of 400 microseconds."""
        if ranges:
            self.span(at - 5, at + 300, "step[EXTEND bs=1 toks=77]")
            self.span(at + 302, at + 395, "draft_extend")
            self.span(at + 304, at + 380, "step[DECODE bs=1]")
        for place in range(30):
            self.launch(at + 10 * place, (at + 10 * place, at + 10 * place + 9, "prefill_gemm"))
        self.launch(at + 310, (at + 310, at + 380, "extend_gemm"))
        return at + 400

    def cycles(self, count: int, at: float = 0.0, **options: Any) -> float:
        for _ in range(count):
            at = self.cycle(at, **options)
        return at

    def value(self) -> dict[str, Any]:
        return {**self.facts, "traceEvents": self.events, "traceName": "x"}

    def write(self, path: Path) -> Path:
        text = json.dumps(self.value())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
        return path

    def without(self, *categories: str) -> TraceBuilder:
        self.events = [event for event in self.events if event.get("cat") not in categories]
        return self

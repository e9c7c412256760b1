"""An engine whose states are a function of token ids and layer, to test what is around the streamed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import ExtractConfig
from eagle3.data.shard_file import StateKey
from eagle3.data.target_argmax import make_target_head
from eagle3.draft.loss import TargetHead
from eagle3.target import stream_extract
from eagle3.target.extract import ExtractReport, run_extract
from eagle3.target.stream_plan import StreamPlan
from eagle3.target.stream_sink import ShardSink
from tests.unit.target.cases import extract_config, write_conversations

CHUNKS = 7
"""That `stream_config` makes: of three samples, two shards each, but for the last."""


class FakeEngine:
    """Counts its walks; `before_put(walk, put)` may raise or kill."""

    device = torch.device("cpu")

    def __init__(self, stream: StreamPlan, walks: list[int], before_put: Callable[[int, int], None]) -> None:
        self._contract = stream.plan.contract
        self._micro = stream.memory.sizes.micro_tokens
        self._walks = walks
        self._before_put = before_put

    def head_tensors(self) -> dict[str, torch.Tensor]:
        hidden = self._contract.hidden_size
        matrix = torch.arange(self._contract.vocab_size * hidden, dtype=torch.float32).view(-1, hidden)
        return {"embed_tokens.weight": matrix, "norm.weight": torch.ones(hidden)}

    def target_head(self) -> TargetHead:
        return make_target_head(self.head_tensors(), {"rms_norm_eps": 1e-5}, "post_norm")

    def walk(self, batch: Sequence[Sequence[int]], sink: ShardSink, advance: Callable[[float], None]) -> None:
        ids = torch.tensor([token for tokens in batch for token in tokens], dtype=torch.float32)
        self._walks.append(len(ids))
        keys: list[StateKey] = [*sorted(key for key in sink.keys if key != "last"), "last"]
        puts = 0
        for key in keys:
            layer = 100 if key == "last" else int(key)
            for begin in range(0, len(ids), self._micro):
                rows = ids[begin : begin + self._micro, None] + layer * torch.arange(self._contract.hidden_size)
                self._before_put(len(self._walks), puts)
                puts += 1
                sink.put(key, begin, rows)
                rows.fill_(float("nan"))
                advance(len(rows) / len(keys))

    def close(self) -> None:
        pass


def stream_config(target: Path, folder: Path, output: str, **values: Any) -> ExtractConfig:
    """20 samples of about 27 tokens."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_conversations(data, 20)
    stream = {"chunk_tokens": 100, "micro_tokens": 16, **values.pop("stream", {})}
    defaults = {"engine": "streamed", "output_indices": [1, 3, 5], "shard_max_samples": 2}
    return extract_config(target, data, folder / output, **{**defaults, **values}, stream=stream)


def as_process(cfg: ExtractConfig, index: int, count: int) -> ExtractConfig:
    values = {"process_index": index, "process_count": count}
    return cfg.model_copy(update={"stream": cfg.stream.model_copy(update=values)})


class Fake:
    """Runs extractions with the fake engine.

    Attributes:
        walks: tokens of each walk so far.
        before_put: see `FakeEngine`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walks: list[int] = []
        self.before_put: Callable[[int, int], None] = lambda walk, put: None
        monkeypatch.setattr(stream_extract, "make_engine", self._engine)
        monkeypatch.setattr(stream_extract, "check_engine", lambda *_: None)

    def _engine(self, stream: StreamPlan) -> FakeEngine:
        return FakeEngine(stream, self.walks, lambda walk, put: self.before_put(walk, put))

    def run(self, cfg: ExtractConfig, index: int = 0, count: int = 1) -> ExtractReport:
        return run_extract(as_process(cfg, index, count))

    def slowly(self) -> None:
        """From now on, a walk takes some milliseconds."""
        self.before_put = lambda walk, put: time.sleep(0.001)


def content(folder: str | Path) -> dict[str, bytes]:
    """Every file's bytes but for the locks; of the manifest all but the provenance."""
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix != ".lock"}
    text = found["manifest.json"].decode()
    found["manifest.json"] = (text[: text.index('  "provenance"')] + text[text.index('  "settings"') :]).encode()
    return found

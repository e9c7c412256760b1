"""When the next window is begun."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from eagle3.draft.config import TTTSettings
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.train import window
from tests.unit.draft.cases import make_batch, make_document, make_head, make_model, make_vocab

SETTINGS = TTTSettings(2, chunk=20)
BATCHES = [make_batch([[make_document([0, 1, 1, 1, 1, 0], seed)]]) for seed in range(3)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    original = TTTLoss.forward

    def forward(*args: object) -> object:
        seen.append("micro-batch")
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(TTTLoss, "forward", forward)
    return seen


def test_on_a_cpu_it_is_begun_before_the_first_micro_batch(calls: list[str]) -> None:
    module = TTTLoss(make_model(), make_vocab(), SETTINGS)
    window.accumulate_window(module, module, BATCHES, make_head(), Accelerator(cpu=True), lambda: calls.append("next"))
    assert calls == ["next", *["micro-batch"] * 3]


def test_on_a_gpu_it_is_begun_when_that_has_the_first_micro_batch(calls: list[str]) -> None:
    module = TTTLoss(make_model(), make_vocab(), SETTINGS)
    counts = [count_terms(batch, make_head(), module.vocab, SETTINGS) for batch in BATCHES]
    accelerator = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), num_processes=1, backward=torch.Tensor.backward,
        no_sync=nullcontext, reduce=lambda value, reduction: value,
    )  # fmt: skip
    moved = [SimpleNamespace(to=lambda *_, batch=batch, **__: batch) for batch in BATCHES]
    in_vocab = sum(count.in_vocab for count in counts)
    window._run_window(module, moved, counts, in_vocab, accelerator, lambda: calls.append("next"))  # type: ignore[arg-type]
    assert calls == ["micro-batch", "next", *["micro-batch"] * 2]

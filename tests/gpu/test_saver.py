"""Checkpoints of weights and moments on a GPU are those of their step, though training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.saver import Saver
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store
from tests.unit.train.test_saver import Late, state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("moments", ["float32", "float8"])
def test_a_checkpoint_is_that_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    draft = {"head_dim": 64, "intermediate_size": 300}
    settings = {"optim": {"learning_rate": 1e-2, "moments": moments}, "draft": draft, "keep_checkpoints": 99}
    run_training(train_config(store, tmp_path / "whole", epochs=2, save_every=1, **settings))
    late = Late(monkeypatch)
    run_training(train_config(store, tmp_path / "run", epochs=2, save_every=2, **settings))
    assert late.late == [2, 4, 6, 8, 10]
    for path in list_checkpoints(tmp_path / "run"):
        for name in ("draft.safetensors", "optimizer.safetensors"):
            assert (path / name).read_bytes() == (tmp_path / "whole/checkpoints" / path.name / name).read_bytes()


def test_copies_are_pinned_and_their_memory_is_used_again(tmp_path: Path) -> None:
    live = {"a": torch.zeros(1 << 20, device="cuda"), "step": torch.tensor(1.0, device="cuda")}
    with Saver(tmp_path, 1, copies=False) as one:
        places = []
        for step in (1, 2):
            live["a"].add_(1)
            one.begin(live, {}, state(step))
            one.wait()
            places.append({key: buffer.data_ptr() for key, buffer in one._buffers.items()})
        assert places[0] == places[1]
        assert all(buffer.is_pinned() for buffer in one._buffers.values())
        assert one._buffers[0, "a"].eq(2).all()

"""Whatever makes a store, its greedy tokens are those of the target's own logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.store import StoreReader, verify
from eagle3.data.target_argmax import greedy_tokens
from eagle3.errors import ProblemsError
from eagle3.target import stream_argmax
from eagle3.target.extract import run_extract
from tests.old_stores import as_version_2
from tests.unit.target.cases import extract_config, make_engine, write_conversations
from tests.unit.target.test_from_store import again

SAMPLES = 12


def own_argmax(target: Path, reader: StoreReader) -> list[torch.Tensor]:
    """What the model says, by its own forward pass in float64, at every token of each sample."""
    model = make_engine(target, [1]).model.double()
    with torch.no_grad():
        return [
            model(reader.read(index).input_ids.long()[None]).logits[0].argmax(-1).int() for index in range(len(reader))
        ]


def assert_greedy(target: Path, reader: StoreReader) -> None:
    for index, expected in enumerate(own_argmax(target, reader)):
        sample = reader.read(index)
        wanted = expected if reader.layout.last_rows == "all" else expected[sample.loss_mask]
        assert sample.target_argmax is not None and sample.target_argmax.tolist() == wanted.tolist(), sample.id
        assert len(set(expected.tolist())) > 3


@pytest.mark.parametrize("values", [{}, {"last_hidden_states": "pre_norm"}, {"last_hidden_rows": "all"}])
@pytest.mark.parametrize("engine", ["transformers", "streamed"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_they_are_the_argmax_of_the_models_own_logits(
    tiny_target: Callable[[str], Path], tmp_path: Path, name: str, engine: str, values: dict[str, Any]
) -> None:
    """Qwen's head is its embedding."""
    target = tiny_target(name)
    data = write_conversations(tmp_path / "data.jsonl", SAMPLES)
    sizes = {"stream": {"chunk_tokens": 100, "micro_tokens": 40}} if engine == "streamed" else {}
    run_extract(extract_config(target, data, tmp_path / "s", output_indices=[1, 3], engine=engine, **values, **sizes))
    assert verify(tmp_path / "s", deep=True) == []
    assert_greedy(target, StoreReader(tmp_path / "s"))


def test_eight_bits_do_not_change_them(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    """They are of the states before they are rounded."""
    target, data = tiny_target("llama"), write_conversations(tmp_path / "data.jsonl", SAMPLES)
    found = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        run_extract(extract_config(target, data, tmp_path / dtype, output_indices=[1, 3], store_dtype=dtype))
        reader = StoreReader(tmp_path / dtype)
        found.append([reader.read(index).target_argmax.tolist() for index in range(SAMPLES)])  # type: ignore[union-attr]
    assert found[0] == found[1]


@pytest.fixture
def old(tiny_target: Callable[[str], Path], tmp_path: Path) -> Path:
    """A store of version 2."""
    data = write_conversations(tmp_path / "data.jsonl", SAMPLES)
    cfg = extract_config(tiny_target("llama"), data, tmp_path / "new", output_indices=[1, 3], shard_max_samples=5)
    run_extract(cfg)
    return as_version_2(tmp_path / "new", tmp_path / "old")


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_an_old_store_is_read_and_a_new_one_made_of_it_has_them(
    tiny_target: Callable[[str], Path], old: Path, tmp_path: Path
) -> None:
    assert verify(old, deep=True) == []
    reader = StoreReader(old)
    assert reader.layout.version == 2 and not reader.layout.has_argmax and reader.read(0).target_argmax is None
    run_extract(again(tiny_target("llama"), old, tmp_path / "made", output_indices=[1, 3], shard_max_samples=5))
    assert shards(tmp_path / "made") == shards(tmp_path / "new")


def test_several_processes_make_the_same_of_an_old_store(
    tiny_target: Callable[[str], Path], old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = again(tiny_target("llama"), old, tmp_path / "made", output_indices=[1, 3], shard_max_samples=5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        run_extract(cfg)
    assert shards(tmp_path / "made") == shards(tmp_path / "new")


def test_a_store_of_version_2_that_is_not_whole_is_refused_with_the_way_out(
    tiny_target: Callable[[str], Path], old: Path, tmp_path: Path
) -> None:
    (old / "shard-00001.safetensors").unlink()
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    cfg = extract_config(tiny_target("llama"), tmp_path / "data.jsonl", old, output_indices=[1, 3], shard_max_samples=5)
    with pytest.raises(ProblemsError, match=r"format version 2.*writes version 3(.|\n)*go on with the eagle3") as error:
        run_extract(cfg)
    assert [problem.kind for problem in error.value.problems] == ["store.other_version"]
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before


def test_tokens_that_a_store_has_are_copied_and_not_found_again(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of states before they were rounded are worth more than those of what was stored."""
    target, data = tiny_target("llama"), write_conversations(tmp_path / "data.jsonl", SAMPLES)
    run_extract(extract_config(target, data, tmp_path / "all", output_indices=[1, 3], last_hidden_rows="all"))
    monkeypatch.setattr("eagle3.target.write.with_argmax", None)
    run_extract(again(target, tmp_path / "all", tmp_path / "few", output_indices=[3], store_dtype="float8_e4m3fn"))
    whole, few = StoreReader(tmp_path / "all"), StoreReader(tmp_path / "few")
    for index in range(SAMPLES):
        assert few.read(index).target_argmax.equal(whole.read(index).supervised_argmax)  # type: ignore[union-attr, arg-type]


def test_a_walk_that_mixes_rows_up_lists_nothing(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = tiny_target("llama"), write_conversations(tmp_path / "data.jsonl", SAMPLES)
    cfg = extract_config(target, data, tmp_path / "s", output_indices=[1, 3], engine="streamed")
    with monkeypatch.context() as patch:
        patch.setattr(stream_argmax, "greedy_tokens", lambda rows, head: greedy_tokens(rows, head).roll(1))
        with pytest.raises(ProblemsError) as error:
            run_extract(cfg)
    assert [problem.kind for problem in error.value.problems] == ["store.argmax"]
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["shards"] == []
    run_extract(cfg)
    assert_greedy(target, StoreReader(tmp_path / "s"))


def test_a_device_without_room_for_the_head_is_one_error(
    tiny_target: Callable[[str], Path], old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.19 GiB.")

    monkeypatch.setattr("eagle3.target.write.with_argmax", full)
    with pytest.raises(ProblemsError, match="Tried to allocate") as error:
        run_extract(again(tiny_target("llama"), old, tmp_path / "made", output_indices=[1, 3]))
    assert [problem.kind for problem in error.value.problems] == ["target.memory"]
    assert "target.device=cpu" in error.value.problems[0].fix

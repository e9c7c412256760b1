from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Kimi_K25ForConditionalGeneration, PreTrainedModel

from eagle3.config import ExtractConfig
from eagle3.data.store import StoredSample, StoreReader, StoreWriter, verify
from eagle3.draft.loss import TargetHead
from eagle3.errors import ProblemsError
from eagle3.target import extract
from eagle3.target.capture import Capture, batches_by_length, shards_by_size
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.target.extract import run_extract
from tests.unit.target.cases import extract_config, relative, write_conversations

TinyTarget = Callable[[str], Path]


def samples_of(folder: str) -> dict[str, StoredSample]:
    reader = StoreReader(folder)
    return {sample.id: sample for sample in map(reader.read, range(len(reader)))}


def assert_equal_stores(one: str, other: str) -> None:
    first, second = samples_of(one), samples_of(other)
    assert first.keys() == second.keys()
    for name, sample in first.items():
        for key in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states"):
            assert torch.equal(getattr(sample, key), getattr(second[name], key)), (name, key)


@pytest.mark.parametrize("name", ["kimi", "llama", "qwen3", "deepseek_v3"])
def test_stored_aux_states_are_transformers_hidden_states(tiny_target: TinyTarget, tmp_path: Path, name: str) -> None:
    """A sample a pass, float32: bit for bit, against the whole model (for Kimi with its vision tower)."""
    folder = tiny_target(name)
    indices = {"kimi": [2, 30, 58]}.get(name, [0, 2, 4])
    data = write_conversations(tmp_path / "data.jsonl", 4)
    cfg = extract_config(folder, data, tmp_path / "store", output_indices=indices, batch_tokens=1)
    report = run_extract(cfg)
    assert (report.samples, report.extracted) == (4, 4)
    assert verify(Path(cfg.output), deep=True) == []
    model_class: Any = Kimi_K25ForConditionalGeneration if name == "kimi" else AutoModelForCausalLM
    model: PreTrainedModel = model_class.from_pretrained(folder)
    for sample in samples_of(cfg.output).values():
        with torch.inference_mode():
            states = model(input_ids=sample.input_ids.long()[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[index + 1][0] for index in indices], dim=-1)
        assert torch.equal(sample.aux_hidden_states, expected)
        assert torch.equal(sample.last_hidden_states, states[-1][0][sample.loss_mask])
        assert sample.loss_mask.any() and not sample.loss_mask.all()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["post_norm", "pre_norm"])
def test_fault_05_target_logits_are_rebuilt_by_the_recorded_recipe(
    tiny_target: TinyTarget, tmp_path: Path, kind: str, name: str
) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 5)
    cfg = extract_config(tiny_target(name), data, tmp_path / "store", output_indices=[1, 3, 5], last_hidden_states=kind)
    run_extract(cfg)
    reader = StoreReader(cfg.output)
    tensors, eps = reader.target_head(), reader.target_config["rms_norm_eps"]
    assert (tensors["norm.weight"] - 1).abs().max() > 0.3
    assert reader.contract.last_hidden_states == kind
    model = AutoModelForCausalLM.from_pretrained(tiny_target(name))
    for sample in map(reader.read, range(len(reader))):
        with torch.inference_mode():
            expected = model(input_ids=sample.input_ids.long()[None]).logits[0]
        for recipe in ("post_norm", "pre_norm"):
            head = TargetHead(tensors["lm_head.weight"], tensors["norm.weight"], eps, recipe)  # type: ignore[arg-type]
            error = (head.logits(sample.last_hidden_states) - expected[sample.loss_mask]).abs().max()
            assert (error < 1e-4) == (recipe == kind)


def test_batched_extraction_equals_one_at_a_time(tiny_target: TinyTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 12)
    stores = []
    for batch_tokens in (1, 8192):
        cfg = extract_config(
            tiny_target("llama"),
            data,
            tmp_path / f"store{batch_tokens}",
            output_indices=[1, 3, 5],
            batch_tokens=batch_tokens,
        )
        run_extract(cfg)
        stores.append(samples_of(cfg.output))
    assert stores[0].keys() == stores[1].keys() and len(stores[0]) == 12
    for name, sample in stores[0].items():
        assert torch.equal(sample.input_ids, stores[1][name].input_ids)
        assert relative(stores[1][name].aux_hidden_states, sample.aux_hidden_states) < 1e-5


@pytest.fixture
def cfg(tiny_target: TinyTarget, tmp_path: Path) -> ExtractConfig:
    data = write_conversations(tmp_path / "data.jsonl", 10)
    return extract_config(tiny_target("llama"), data, tmp_path / "store", output_indices=[1, 3, 5], shard_max_samples=3)


def test_samples_are_stored_in_the_order_of_the_data(cfg: ExtractConfig) -> None:
    run_extract(cfg)
    reader = StoreReader(cfg.output)
    assert [sample.id for sample in reader.samples] == [f"c{number}" for number in range(10)]
    assert len(list(Path(cfg.output).glob("shard-*"))) == 4


def test_a_failed_self_check_writes_nothing(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TransformersEngine._captures

    def shifted(self: TransformersEngine, batch: Sequence[Sequence[int]], taken: dict) -> list[Capture]:
        return right(self, batch, {**taken, 3: taken[1]})

    monkeypatch.setattr(TransformersEngine, "_captures", shifted)
    with pytest.raises(ProblemsError, match=r"selfcheck\.aux.*output index 3 holds hidden_states\[2\]"):
        run_extract(cfg)
    assert not Path(cfg.output).exists()


def test_an_interrupted_store_is_finished_bit_for_bit(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cfg.model_copy(update={"output": f"{cfg.output}-whole"})
    run_extract(whole)
    write_shard, written = StoreWriter.write_shard, []

    def stop_after_two(self: StoreWriter, samples: Sequence[StoredSample]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write_shard(self, samples)
        written.append(len(samples))

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "write_shard", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            run_extract(cfg)
    captured: list[int] = []
    capture = TransformersEngine.capture

    def counting(self: TransformersEngine, batch: Sequence[Sequence[int]]) -> list[Capture]:
        captured.append(len(batch))
        return capture(self, batch)

    monkeypatch.setattr(TransformersEngine, "capture", counting)
    report = run_extract(cfg)
    assert (report.samples, report.extracted) == (10, 4)
    assert sum(captured) == 4, "only what was missing is run again"
    assert_equal_stores(cfg.output, whole.output)
    for shard in Path(whole.output).glob("*.safetensors"):
        assert (Path(cfg.output) / shard.name).read_bytes() == shard.read_bytes()


def test_fault_08_a_damaged_shard_is_extracted_again(cfg: ExtractConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_extract(cfg)
    before = samples_of(cfg.output)
    shard = Path(cfg.output) / "shard-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) * 9 // 10])
    report = run_extract(cfg)
    assert report.extracted == 3
    assert "shard-00001.safetensors" in capsys.readouterr().err
    assert shard.read_bytes() == data
    assert before.keys() == samples_of(cfg.output).keys()


def test_a_complete_store_needs_no_target(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run_extract(cfg)
    monkeypatch.setattr(extract, "load_model", lambda *args: pytest.fail("loaded the target"))
    report = run_extract(cfg)
    assert (report.samples, report.extracted) == (10, 0)


def test_bfloat16_store_holds_rounded_states(cfg: ExtractConfig) -> None:
    run_extract(cfg)
    half = cfg.model_copy(update={"output": f"{cfg.output}-half", "store_dtype": "bfloat16"})
    run_extract(half)
    exact, rounded = samples_of(cfg.output), samples_of(half.output)
    for name, sample in exact.items():
        assert torch.equal(rounded[name].aux_hidden_states, sample.aux_hidden_states.bfloat16())
        assert torch.equal(rounded[name].last_hidden_states, sample.last_hidden_states.bfloat16())


def test_batches_keep_within_their_tokens_padding_included() -> None:
    lengths = [5, 9, 3, 50, 4, 9, 1]
    batches = batches_by_length(lengths, 18)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 18
    assert batches == [[6, 2, 4], [0, 1], [5], [3]]


def test_shards_keep_within_both_limits() -> None:
    assert shards_by_size([4, 4, 4, 20, 1, 1, 1, 1], 10, 3) == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert shards_by_size([], 10, 3) == []

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from eagle3.config import ExtractConfig
from eagle3.data.chat import load_tokenizer
from eagle3.data.store_format import MANIFEST_FILE
from eagle3.errors import ProblemsError
from eagle3.target import extract
from eagle3.target.estimate import dry_run
from eagle3.target.plan import check_disk, make_plan, process_problems
from tests.unit.target.cases import extract_config, write_conversations

TinyTarget = Callable[[str], Path]


@pytest.fixture
def cfg(tiny_target: TinyTarget, tmp_path: Path) -> ExtractConfig:
    data = write_conversations(tmp_path / "data.jsonl", 6)
    return extract_config(tiny_target("llama"), data, tmp_path / "store", output_indices=[1, 3, 5])


def changed(cfg: ExtractConfig, **values: object) -> ExtractConfig:
    nested = cfg.model_dump()
    for key, value in values.items():
        section, _, leaf = key.partition("__")
        if leaf:
            nested[section][leaf] = value
        else:
            nested[section] = value
    return ExtractConfig.model_validate(nested)


@pytest.mark.parametrize(
    ("indices", "kind"),
    [([1, 3, 8], "out_of_range"), ([3, 1], "unsorted"), ([1, 1], "duplicate"), ([-2, 1], "negative"), ([], "count")],
)
def test_layers_are_checked_against_the_targets_own_number(cfg: ExtractConfig, indices: list[int], kind: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        make_plan(changed(cfg, output_indices=indices))
    assert {problem.kind for problem in caught.value.problems} == {f"layers.{kind}"}
    assert not Path(cfg.output).exists()


def test_the_contract_says_what_is_captured(cfg: ExtractConfig) -> None:
    contract = make_plan(changed(cfg, last_hidden_states="pre_norm", store_dtype="bfloat16")).contract
    assert contract.output_indices == (1, 3, 5)
    assert (contract.last_hidden_states, contract.dtype) == ("pre_norm", "bfloat16")
    assert (contract.num_hidden_layers, contract.hidden_size, contract.vocab_size) == (8, 64, 512)


def test_settings_hold_the_special_tokens(cfg: ExtractConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    expected = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert make_plan(cfg).settings["keep_ids"] == sorted(expected)


def test_estimate_is_the_size_of_the_store(cfg: ExtractConfig) -> None:
    plan = make_plan(cfg)
    estimate = sum(plan.sizes) + plan.head_bytes
    extract.run_extract(cfg)
    written = sum(path.stat().st_size for path in Path(cfg.output).glob("*.safetensors"))
    headers = 4096
    assert estimate <= written <= estimate + headers


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (-1, False)])
def test_disk_that_cannot_hold_it_is_refused_before_anything_is_written(
    cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    cfg = changed(cfg, free_disk_fraction=0.25)
    plan = make_plan(cfg)
    total = 1 << 40
    free = sum(plan.sizes) + plan.head_bytes + total // 4 + spare
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, used=total - free, free=free))
    if fits:
        check_disk(plan)
        return
    monkeypatch.setattr(extract, "load_model", lambda *args: pytest.fail("loaded the target"))
    with pytest.raises(ProblemsError, match=r"extract\.disk.*256\.00 GiB must stay free"):
        extract.run_extract(cfg)
    assert not Path(cfg.output).exists()


def test_what_is_already_written_needs_no_room(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    extract.run_extract(cfg)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100, used=100, free=0))
    check_disk(make_plan(cfg))


def test_resume_under_other_settings_lists_each_and_loads_nothing(
    cfg: ExtractConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract.run_extract(cfg)
    before = {path.name: path.read_bytes() for path in Path(cfg.output).iterdir()}
    other_data = write_conversations(tmp_path / "other.jsonl", 7)
    other = changed(
        cfg,
        output_indices=[2, 3, 5],
        store_dtype="bfloat16",
        last_hidden_states="pre_norm",
        target__dtype="bfloat16",
        data__path=str(other_data),
        data__max_length=20,
        data__chat_template_kwargs={"thinking": False},
    )
    monkeypatch.setattr(extract, "load_model", lambda *args: pytest.fail("loaded the target"))
    with pytest.raises(ProblemsError) as caught:
        extract.run_extract(other)
    found = [problem.message for problem in caught.value.problems]
    expected = [
        "layer",
        "last_hidden_states",
        "dtype is",
        "chat_template_kwargs",
        "conversations",
        "max_length",
        "sample_count",
        "target.dtype",
    ]
    assert len(found) == len(expected)
    for word in expected:
        assert any(word in message for message in found), word
    assert {path.name: path.read_bytes() for path in Path(cfg.output).iterdir()} == before


def test_resume_with_other_weights_of_the_same_shapes_is_refused(
    cfg: ExtractConfig, tiny_target: TinyTarget, tmp_path: Path
) -> None:
    from eagle3.target.tiny import make_tiny_llama

    extract.run_extract(cfg)
    other = make_tiny_llama(tmp_path / tiny_target("llama").name, seed=1)
    with pytest.raises(ProblemsError, match=r"settings\.target\.weights") as caught:
        extract.run_extract(changed(cfg, target__path=str(other)))
    assert len(caught.value.problems) == 1


def test_resume_with_another_tokenizer_or_template_is_refused(cfg: ExtractConfig, tmp_path: Path) -> None:
    extract.run_extract(cfg)
    folder = Path(shutil.copytree(cfg.target.path, tmp_path / Path(cfg.target.path).name))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>' + '\\n'", "<|im_end|>'"))
    with pytest.raises(ProblemsError, match=r"contract\.chat_template_digest"):
        extract.run_extract(changed(cfg, target__path=str(folder)))


def test_only_text_is_extracted_from_kimi(tiny_target: TinyTarget, tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 2)
    tokenizer = load_tokenizer(str(tiny_target("kimi")))
    messages = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat."}]
    answer = tokenizer("A cat.<|media_pad|>", add_special_tokens=False)["input_ids"]
    with data.open("a") as handle:
        handle.write(json.dumps({"id": "picture", "messages": messages, "answer_ids": answer}) + "\n")
    cfg = extract_config(tiny_target("kimi"), data, tmp_path / "store", output_indices=[2, 30, 58])
    with pytest.raises(ProblemsError) as caught:
        make_plan(cfg)
    assert [(problem.where, problem.kind) for problem in caught.value.problems] == [("picture", "extract.not_text")]
    plan = make_plan(changed(cfg, data__skip_bad=True))
    assert [sample.id for sample in plan.samples] == ["c0", "c1"]
    assert plan.prepared.dropped == {"extract.not_text": 1}
    assert plan.prepared.kept == 2
    assert plan.prepared.tokens == sum(len(sample.input_ids) for sample in plan.samples)


def test_samples_beyond_the_context_or_the_vocabulary_are_refused(tiny_target: TinyTarget, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target("llama"), tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    data = write_conversations(tmp_path / "data.jsonl", 3)
    cfg = extract_config(folder, data, tmp_path / "store", output_indices=[1, 3, 5])
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    with pytest.raises(ProblemsError, match=r"extract\.too_long.*context is 8"):
        make_plan(cfg)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 509}))
    with pytest.raises(ProblemsError, match=r"extract\.vocabulary.*token 511.*ends at 508"):
        make_plan(cfg)


@pytest.mark.parametrize("engine", ["auto", "transformers", "sglang"])
def test_several_processes_of_an_engine_that_does_not_share_its_work_are_refused(
    cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProblemsError, match=r"process 1 of 2(.|\n)*pass engine=streamed") as caught:
        extract.run_extract(changed(cfg, engine=engine))
    (problem,) = caught.value.problems
    assert (problem.kind, problem.where) == ("extract.one_process", "RANK") and not Path(cfg.output).exists()
    assert [item.kind for item in dry_run(changed(cfg, engine=engine)).problems] == ["extract.one_process"]


def test_one_process_and_the_tasks_of_a_slurm_array_may_run_any_engine(
    cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(cfg)
    assert process_problems(plan) == []
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert process_problems(plan) == []


def test_a_store_that_is_no_store_is_refused(cfg: ExtractConfig) -> None:
    Path(cfg.output).mkdir()
    (Path(cfg.output) / MANIFEST_FILE).write_text("{}")
    with pytest.raises(ProblemsError, match=r"store\.format"):
        extract.run_extract(cfg)

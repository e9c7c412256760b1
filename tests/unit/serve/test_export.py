from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3.config import ServeConfig
from eagle3.errors import Problem, ProblemsError
from eagle3.serve import export
from eagle3.serve.export import export_run
from eagle3.serve.saved_draft import load_exported, load_run
from eagle3.train.checkpoint import TrainState, save_checkpoint
from eagle3.wiring.checks import check_checkpoint
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.engines import newest_known
from eagle3.wiring.fingerprint_file import load_fingerprint

from .cases import (
    HIDDEN,
    VOCAB,
    Run,
    edit_tensors,
    kinds,
    make_kimi_run,
    make_run,
    make_target_config,
    serve,
    with_contract,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def refused(cfg: ServeConfig) -> ProblemsError:
    with pytest.raises(ProblemsError) as caught:
        export_run(cfg)
    return caught.value


def test_the_folder_holds_four_files_and_reads_back_as_the_run(run: Run, tmp_path: Path) -> None:
    export_run(serve(run, tmp_path / "out", dtype="float32"))
    files = {"config.json", "model.safetensors", "eagle3_contract.json", "eagle3_fingerprint.json"}
    assert set(content(tmp_path / "out")) == files
    assert not list(tmp_path.glob("*.tmp"))
    draft = load_exported(tmp_path / "out")
    assert draft.contract == run.contract and draft.vocab.digest == run.vocab.digest and draft.config == run.config
    assert draft.state.keys() == run.state.keys()
    assert all(torch.equal(draft.state[name], run.state[name]) for name in run.state)


def test_the_fingerprint_of_the_dataset_comes_along(run: Run, tmp_path: Path) -> None:
    export_run(serve(run, tmp_path / "out"))
    fingerprint, contract = load_fingerprint(tmp_path / "out")
    assert fingerprint == load_fingerprint(run.dataset)[0] and contract == run.contract
    export_run(serve(run, tmp_path / "out"))


def test_a_run_without_a_fingerprint_is_exported_without_one(run: Run, tmp_path: Path) -> None:
    (run.folder / "eagle3_fingerprint.json").unlink()
    export_run(serve(run, tmp_path / "out"))
    assert "eagle3_fingerprint.json" not in content(tmp_path / "out")


def test_a_damaged_fingerprint_is_not_exported(run: Run, tmp_path: Path) -> None:
    path = run.folder / "eagle3_fingerprint.json"
    path.write_text(path.read_text().replace('"sample": "sample-0"', '"sample": "sample-1"'))
    assert kinds(refused(serve(run, tmp_path / "out"))) == ["fingerprint.digest"]
    assert not (tmp_path / "out").exists()


def test_the_file_has_exactly_the_names_that_sglang_reads(run: Run, tmp_path: Path) -> None:
    export_run(serve(run, tmp_path / "out"))
    layer = [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm",
    ]  # fmt: skip
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == names
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN) and tensors["lm_head.weight"].shape == (8, HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 2 * HIDDEN)
    assert {tensors[name].dtype for name in names - {"d2t", "t2d"}} == {torch.bfloat16}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_two_exports_are_byte_equal(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_run(serve(run, tmp_path / name, include_embedding=True))
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.parametrize(
    ("version", "ids"),
    [
        ("0.5.10", [2, 30, 58]),
        ("0.5.11", [2, 30, 58]),
        ("0.5.12.post1", [2, 30, 58]),
        ("0.5.13", [3, 31, 59]),
        ("0.5.16", [3, 31, 59]),
        ("0.5.23", [3, 31, 59]),
    ],
)
def test_kimi_ids_are_those_that_this_version_needs(tmp_path: Path, version: str, ids: list[int]) -> None:
    report = export_run(serve(make_kimi_run(tmp_path), tmp_path / "out", engine_version=version))
    config = config_of(tmp_path / "out")
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert config["eagle3"] == {
        "exported_for": {"engine": "sglang", "engine_version": version},
        "output_indices": [2, 30, 58],
        "context_length": 8192,
    }
    assert not report.version_is_default
    assert not check_checkpoint(tmp_path / "out", engine="sglang", engine_version=version, cuda_graphs=False)
    other = "0.5.23" if ids[0] == 2 else "0.5.12.post1"
    assert check_checkpoint(tmp_path / "out", engine="sglang", engine_version=other)


@pytest.mark.parametrize(("version", "differs"), [("0.5.10.post1", True), ("0.5.11", False)])
def test_an_export_warns_of_cuda_graphs_that_ignore_its_ids_and_a_check_refuses_them(
    tmp_path: Path, version: str, differs: bool
) -> None:
    report = export_run(serve(make_kimi_run(tmp_path), tmp_path / "out", engine_version=version))
    assert any("--disable-cuda-graph" in warning for warning in report.warnings) == differs
    found = check_checkpoint(tmp_path / "out", engine_version=version)
    assert [problem.kind for problem in found] == (["wiring.cuda_graphs"] if differs else [])
    assert not check_checkpoint(tmp_path / "out", engine_version=version, cuda_graphs=False)


@pytest.mark.parametrize("version", ["0.5.8", "0.5.9"])
def test_kimi_is_refused_before_its_first_version(tmp_path: Path, version: str) -> None:
    error = refused(serve(make_kimi_run(tmp_path), tmp_path / "out", engine_version=version))
    assert kinds(error) == ["engine.unsupported"]
    assert not (tmp_path / "out").exists()


def test_llama_ids_are_output_indices_in_every_version(run: Run, tmp_path: Path) -> None:
    for version in ("0.5.8", "0.5.23"):
        export_run(serve(run, tmp_path / "out", engine_version=version))
        assert config_of(tmp_path / "out")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
        assert config_of(tmp_path / "out")["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]


def test_the_default_version_is_the_newest_known_and_is_said(run: Run, tmp_path: Path) -> None:
    report = export_run(serve(run, tmp_path / "out"))
    newest = newest_known("sglang")
    assert report.version_is_default and report.ids.version == newest
    assert f"for sglang {newest} (the newest known" in report.render()
    assert config_of(tmp_path / "out")["eagle3"]["exported_for"]["engine_version"] == newest
    named = export_run(serve(run, tmp_path / "out", engine_version="0.5.16"))
    assert "for sglang 0.5.16 (as given)" in named.render()


@pytest.mark.parametrize(
    ("option", "ignored_by", "known_to"),
    [
        ("norm_output", "0.5.11", "0.5.12.post1"),
        ("fc_norm", "0.5.11", "0.5.12.post1"),
        ("norm_before_fc", "0.5.16", "0.5.23"),
    ],
)
def test_an_option_is_refused_where_the_server_ignores_it(
    option: str, ignored_by: str, known_to: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, **{option: True})
    error = refused(serve(run, tmp_path / "out", engine_version=ignored_by))
    assert kinds(error) == ["config.option_unknown"] and option in str(error)
    assert not (tmp_path / "out").exists()
    export_run(serve(run, tmp_path / "out", engine_version=known_to))
    assert config_of(tmp_path / "out")[option] is True
    read = load_exported(tmp_path / "out")
    assert getattr(read.config, option)
    assert read.state.keys() == run.state.keys()


def test_a_faulty_checkpoint_is_refused_with_every_tensor_named(run: Run, tmp_path: Path) -> None:
    weights = {name: value.clone() for name, value in run.state.items()}
    del weights["fc.weight"]
    weights["stray"] = torch.ones(2)
    weights["norm.weight"][0] = torch.nan
    weights["lm_head.weight"] = torch.ones(9, HIDDEN)
    save_checkpoint(run.folder, weights, {}, TrainState(30, 0, 1, "sha256:" + "3" * 64))
    error = refused(serve(run, tmp_path / "out", checkpoint="last"))
    assert sorted(kinds(error)) == ["tensor.extra", "tensor.missing", "tensor.not_finite", "tensor.shape"]
    assert "step-00000030" in str(error) and not (tmp_path / "out").exists()


def test_best_last_and_a_name_choose_the_checkpoint(run: Run, tmp_path: Path) -> None:
    later = {name: value + 1 for name, value in run.state.items()}
    save_checkpoint(run.folder, later, {}, TrainState(30, 0, 1, "sha256:" + "3" * 64))
    chosen = {name: load_run(run.folder, name).state["norm.weight"] for name in ("best", "last", "step-00000020")}
    assert torch.equal(chosen["best"], run.state["norm.weight"])
    assert torch.equal(chosen["step-00000020"], run.state["norm.weight"])
    assert torch.equal(chosen["last"], later["norm.weight"])
    assert export_run(serve(run, tmp_path / "out", checkpoint="last")).checkpoint == "step-00000030"
    error = refused(serve(run, tmp_path / "out", checkpoint="step-00000040"))
    assert kinds(error) == ["run.checkpoint"] and "step-00000020, step-00000030" in str(error)


def test_a_run_whose_parts_contradict_each_other_is_refused(run: Run, tmp_path: Path) -> None:
    with_contract(run, vocab_size=40, output_indices=(1, 5), draft_vocab_digest="sha256:" + "4" * 64)
    error = refused(serve(run, tmp_path / "out"))
    assert kinds(error) == ["draft.disagreement"] * 3


def test_a_contract_without_draft_vocab_is_refused(run: Run, tmp_path: Path) -> None:
    with_contract(run, draft_vocab_digest=None)
    assert kinds(refused(serve(run, tmp_path / "out"))) == ["draft.disagreement"]


def test_the_output_is_replaced_only_if_it_is_an_export_of_ours(run: Run, tmp_path: Path) -> None:
    cfg = serve(run, tmp_path / "out")
    (tmp_path / "out").mkdir()
    export_run(cfg)
    export_run(cfg)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    error = refused(cfg)
    assert kinds(error) == ["export.output"] and "notes.txt" in str(error)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    for output in (run.folder, run.dataset, tmp_path):
        assert kinds(refused(serve(run, output))) == ["export.output"]
    (tmp_path / "file").write_text("mine")
    assert kinds(refused(serve(run, tmp_path / "file"))) == ["export.output"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_of_another_maker_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert kinds(refused(serve(run, other))) == ["export.output"]
    assert list(content(other)) == ["config.json"]


def test_nothing_is_left_if_the_result_fails_its_own_check(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    export_run(serve(run, output, engine_version="0.5.16"))
    before = content(output)
    real = export.check_checkpoint

    def tampering(folder: Path, **values: Any) -> list[Problem]:
        edit_tensors(folder / "model.safetensors", **{"fc.weight": None})
        return real(folder, **values)

    monkeypatch.setattr(export, "check_checkpoint", tampering)
    error = refused(serve(run, output))
    assert "fc" in str(error) and "out.tmp" not in str(error) and str(output) in str(error)
    assert content(output) == before
    refused(serve(run, tmp_path / "fresh"))
    assert not (tmp_path / "fresh").exists() and not list(tmp_path.glob("*.tmp"))


def test_include_embedding_needs_the_dataset_of_the_same_contract(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", outputs=(0, 5, 8))
    (run.dataset / "manifest.json").write_bytes((other.dataset / "manifest.json").read_bytes())
    error = refused(serve(run, tmp_path / "out", include_embedding=True))
    assert "contract.output_indices" in kinds(error)


def test_the_draft_context_covers_a_longer_served_one(run: Run, tmp_path: Path) -> None:
    assert config_of(_exported(run, tmp_path / "a"))["max_position_embeddings"] == 8192
    assert config_of(_exported(run, tmp_path / "b", context_length=20000))["max_position_embeddings"] == 20000
    assert config_of(_exported(run, tmp_path / "c", context_length=100))["max_position_embeddings"] == 8192


def _exported(run: Run, output: Path, **values: Any) -> Path:
    return export_run(serve(run, output, **values)).output


def test_fault_18_embedding_is_absent_on_purpose_or_bit_equal_to_the_targets(run: Run, tmp_path: Path) -> None:
    without = load_file(_exported(run, tmp_path / "without") / "model.safetensors")
    assert "embed_tokens.weight" not in without
    tensors = load_file(_exported(run, tmp_path / "with", include_embedding=True) / "model.safetensors")
    assert torch.equal(tensors.pop("embed_tokens.weight"), run.embedding)
    assert tensors.keys() == without.keys()
    assert load_exported(tmp_path / "with").state.keys() == run.state.keys()


def test_fault_19_vocab_tables_are_in_the_weights_file_and_map_as_in_training(run: Run, tmp_path: Path) -> None:
    tensors = load_file(_exported(run, tmp_path / "out") / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].shape == (8,)
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].shape == (VOCAB,)
    states = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(3))
    model = load_run(run.folder).model(run.embedding)
    inside = run.vocab.to_target(model.logits(states).argmax(-1))
    with torch.no_grad():
        normed = model.norm(states)
    drafted = (normed @ tensors["lm_head.weight"].float().T).argmax(-1)
    served = (tensors["d2t"] + torch.arange(8))[drafted]  # as SGLang's load_weights builds hot_token_id
    assert torch.equal(served, inside) and len(set(served.tolist())) > 2
    assert torch.equal(tensors["t2d"].nonzero().flatten(), run.vocab.ids)


def test_fault_19_large_ids_survive_a_bf16_export(tmp_path: Path) -> None:
    ids = (257, 1001, 163607)
    run = make_run(tmp_path)
    offsets = torch.tensor(ids) - torch.arange(3)
    assert offsets.to(torch.bfloat16).long().tolist() != offsets.tolist()
    edit_tensors(run.folder / "draft_vocab.safetensors", d2t=offsets)
    error = refused(serve(run, tmp_path / "out"))
    assert "draft_vocab.out_of_range" in kinds(error)


def test_fault_19_a_reduced_vocab_without_tables_is_refused(run: Run, tmp_path: Path) -> None:
    output = _exported(run, tmp_path / "out")
    edit_tensors(output / "model.safetensors", d2t=None, t2d=None)
    assert unreadable(output) == ["tensor.missing"] * 2
    edit_tensors(run.folder / "draft_vocab.safetensors", t2d=None)
    assert kinds(refused(serve(run, tmp_path / "again"))) == ["draft_vocab.tables"]
    (run.folder / "draft_vocab.safetensors").unlink()
    assert kinds(refused(serve(run, tmp_path / "again"))) == ["file.missing"]


def test_fault_20_a_shorter_training_length_is_a_warning_with_both_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_length=2048)
    report = export_run(serve(run, tmp_path / "out", context_length=8192))
    (warning,) = report.warnings
    assert "2048" in warning and "8192" in warning and warning in report.render()
    assert not export_run(serve(run, tmp_path / "out", context_length=2048)).warnings


def test_fault_21_a_tied_target_gives_an_untied_draft_with_both_tensors(tmp_path: Path) -> None:
    target = make_target_config(tie_word_embeddings=True)
    run = make_run(tmp_path, target, tied=True)
    output = _exported(run, tmp_path / "out", dtype="float32", include_embedding=True)
    assert config_of(output)["tie_word_embeddings"] is False
    tensors = load_file(output / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], run.state["lm_head.weight"])
    assert tensors["lm_head.weight"].shape == (8, HIDDEN)
    assert torch.equal(tensors["embed_tokens.weight"], run.embedding) and run.embedding.shape == (VOCAB, HIDDEN)


def test_fault_21_a_head_that_is_the_embedding_is_written_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_target_config(tie_word_embeddings=True), tied=True, draft_ids=range(VOCAB))
    tied = {**run.state, "lm_head.weight": run.embedding}
    save_checkpoint(run.folder, tied, {}, TrainState(30, 0, 1, "sha256:" + "3" * 64))
    output = _exported(run, tmp_path / "out", checkpoint="last", dtype="float32", include_embedding=True)
    tensors = load_file(output / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], run.embedding)
    assert torch.equal(tensors["embed_tokens.weight"], run.embedding)
    assert not tensors["d2t"].any() and tensors["t2d"].all()
    assert config_of(output)["draft_vocab_size"] == VOCAB


def test_load_exported_refuses_what_the_wiring_check_finds(run: Run, tmp_path: Path) -> None:
    output = _exported(run, tmp_path / "out")
    WiringContract.load(output).with_draft_vocab("sha256:" + "5" * 64).save(output)
    assert unreadable(output) == ["contract.draft_vocab_digest"]
    config = config_of(_exported(run, output))
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 4, 7]
    (output / "config.json").write_text(json.dumps(config))
    assert unreadable(output) == ["wiring.one_early"]


def test_load_exported_refuses_values_and_files_that_are_damaged(run: Run, tmp_path: Path) -> None:
    weights = _exported(run, tmp_path / "out") / "model.safetensors"
    whole = weights.read_bytes()
    edit_tensors(weights, **{"norm.weight": torch.full((HIDDEN,), torch.nan, dtype=torch.bfloat16)})
    assert unreadable(tmp_path / "out") == ["tensor.not_finite"]
    weights.write_bytes(whole[:-40])
    assert unreadable(tmp_path / "out") == ["safetensors.truncated"]
    weights.write_bytes(whole)
    load_exported(tmp_path / "out")


def unreadable(folder: Path) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        load_exported(folder)
    return kinds(caught.value)

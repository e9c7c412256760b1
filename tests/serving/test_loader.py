"""The real loader of SGLang takes what `eagle3 export` writes: all of it, bit for bit, and nothing is left over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.draft.config import RopeConfig
from eagle3.serve.export import export_run
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring import check_checkpoint
from tests.serving.sglang_venv import SERVED_VERSION, run_script
from tests.unit.serve.cases import HIDDEN, KIMI, Run, edit_tensors, make_run, make_target_config, serve

NORMS = {"fc_norm": True, "norm_before_fc": True, "norm_output": True}


def llama_like(folder: Path, **values: Any) -> Run:
    return make_run(folder, **values)


def kimi_like(folder: Path, **values: Any) -> Run:
    """Kimi-K2.5's depth and ids, and its drafter's proportions: many heads, few key/value heads, a wide MLP."""
    target = make_target_config(**KIMI, num_attention_heads=8)
    shape = {"num_key_value_heads": 1, "intermediate_size": 92, "rope": RopeConfig(rope_theta=50000.0)}
    return make_run(folder, target, (2, 30, 58), "kimi_k25", **shape, **values)


CASES: dict[str, tuple[Callable[..., Run], str, bool, dict[str, Any]]] = {
    "llama": (llama_like, "bfloat16", False, {}),
    "llama, embedding": (llama_like, "float32", True, {}),
    "llama, all norms": (llama_like, "float32", False, NORMS),
    "kimi": (kimi_like, "bfloat16", False, {}),
    "kimi, embedding": (kimi_like, "bfloat16", True, {}),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Path, dict[str, torch.Tensor]]]:
    """For a case: the run, its export and what the real loader made of it; one process loads all of them."""
    folder = tmp_path_factory.mktemp("loader")
    runs, cases = {}, []
    for number, (name, (make, dtype, include_embedding, options)) in enumerate(CASES.items()):
        run = make(folder / str(number), **options)
        output = folder / f"export-{number}"
        values = {"dtype": dtype, "include_embedding": include_embedding, "engine_version": SERVED_VERSION}
        export_run(serve(run, output, **values))
        case = {"checkpoint": output, "dtype": dtype, "save": folder / f"{number}.safetensors"}
        if not include_embedding:
            case["embedding"] = run.dataset / "target_head.safetensors"
        cases.append(case)
        runs[name] = run
    assert load_all(folder, cases) == [None] * len(cases)

    def read(name: str) -> tuple[Run, Path, dict[str, torch.Tensor]]:
        case = cases[list(CASES).index(name)]
        return runs[name], Path(case["checkpoint"]), load_file(case["save"])

    return read


def load_all(folder: Path, cases: list[dict[str, Any]]) -> list[str | None]:
    """What the real loader raised for each case."""
    errors: list[str | None] = run_script(
        "load_checkpoint", {"target": make_tiny_llama(folder / "target"), "cases": cases}, folder
    )
    return errors


def unfused(parameters: dict[str, torch.Tensor], run: Run) -> dict[str, torch.Tensor]:
    """SGLang's parameters under our names: q, k, v and gate, up taken apart, the padding of the vocabs cut off."""
    config = run.config
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    parts = {
        "self_attn.qkv_proj": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [query, key, key]),
        "mlp.gate_up_proj": (["mlp.gate_proj", "mlp.up_proj"], [config.intermediate_size] * 2),
    }
    tensors = {}
    for stored, value in parameters.items():
        name = stored.removeprefix("model.").replace("layers.0.", "midlayer.").removesuffix(".weight")
        fused = next((part for part in parts if name.endswith(part)), None)
        if fused is None:
            tensors[f"{name}.weight"] = value
        else:
            names, sizes = parts[fused]
            prefix = name.removesuffix(fused)
            tensors |= {f"{prefix}{n}.weight": v for n, v in zip(names, value.split(sizes), strict=True)}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][: config.draft_vocab_size]
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][: config.vocab_size]
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_run_lands_bit_equal(name: str, loaded: Callable[[str], Any]) -> None:
    run, export, parameters = loaded(name)
    dtype = parameters["lm_head.weight"].dtype
    hot_token_id = parameters.pop("hot_token_id")

    landed = unfused(parameters, run)

    assert dtype == getattr(torch, CASES[name][1])
    assert landed.keys() == run.state.keys() | {"embed_tokens.weight"}
    for tensor, value in run.state.items():
        assert torch.equal(landed[tensor], value.to(dtype)), tensor
    assert torch.equal(landed["embed_tokens.weight"], run.embedding.to(dtype))
    assert torch.equal(hot_token_id, run.vocab.ids)
    assert ("embed_tokens.weight" in load_file(export / "model.safetensors")) == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_uninitialised(name: str, loaded: Callable[[str], Any]) -> None:
    _, _, parameters = loaded(name)

    assert [key for key, value in parameters.items() if value.isnan().any()] == []


def copied(export: Path, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """An export with changed config keys and tensors; None removes one."""
    shutil.copytree(export, folder)
    values = json.loads((folder / "config.json").read_text()) | config
    values = {key: value for key, value in values.items() if key not in config or value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    edit_tensors(folder / "model.safetensors", **tensors)
    return folder


def test_what_the_loader_does_without_a_word_has_a_name_here(tmp_path: Path) -> None:
    """The rows of "What SGLang does with a wrong checkpoint" in docs/wiring.md that need no engine."""
    run = llama_like(tmp_path)
    export = export_run(serve(run, tmp_path / "export", dtype="float32", engine_version=SERVED_VERSION)).output
    draft_ids = run.vocab.ids
    wrong: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], set[str]]] = {
        "fc missing": ({}, {"fc.weight": None}, {"tensor.missing"}),
        "norm missing": ({}, {"midlayer.hidden_norm.weight": None}, {"tensor.missing"}),
        "unknown name": ({}, {"midlayer.hidden_nrom.weight": torch.ones(HIDDEN)}, {"tensor.extra"}),
        "d2t missing": ({}, {"d2t": None}, {"tensor.missing"}),
        "d2t absolute": ({}, {"d2t": draft_ids.clone()}, {"draft_vocab.absolute_ids"}),
        "tied": ({"tie_word_embeddings": True}, {}, {"config.tie_word_embeddings"}),
        "fc narrow": ({}, {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}, {"tensor.shape"}),
        "q narrow": ({}, {"midlayer.self_attn.q_proj.weight": torch.ones(24, HIDDEN)}, {"tensor.shape"}),
        "head narrow": ({}, {"lm_head.weight": torch.ones(7, HIDDEN)}, {"tensor.shape"}),
    }
    folders = [copied(export, tmp_path / name, config, tensors) for name, (config, tensors, _) in wrong.items()]
    cases = [{"checkpoint": folder, "dtype": "float32", "save": folder / "loaded"} for folder in folders]

    errors = dict(zip(wrong, load_all(tmp_path, cases), strict=True))

    silent = {name: load_file(tmp_path / name / "loaded") for name, error in errors.items() if error is None}
    assert silent.keys() == wrong.keys() - {"fc narrow", "q narrow", "head narrow"}
    left = {name: {key for key, value in found.items() if value.isnan().any()} for name, found in silent.items()}
    embedding = "model.embed_tokens.weight"
    assert left["fc missing"] == {embedding, "model.fc.weight"}
    assert left["norm missing"] == {embedding, "model.layers.0.hidden_norm.weight"}
    assert left["unknown name"] == left["d2t missing"] == left["d2t absolute"] == {embedding}
    assert "hot_token_id" not in silent["d2t missing"]
    assert torch.equal(silent["d2t absolute"]["hot_token_id"], draft_ids + torch.arange(len(draft_ids)))
    assert "lm_head.weight" not in silent["tied"]
    for folder, (name, (_, _, kinds)) in zip(folders, wrong.items(), strict=True):
        assert {problem.kind for problem in check_checkpoint(folder, engine_version=SERVED_VERSION)} == kinds, name

"""A drafter whose layer starts as one of the target's: the same computation, from setup to export; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.config import ServeConfig, TargetConfig, TrainConfig, build_config
from eagle3.data.store import StoreReader
from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import DraftConfig
from eagle3.draft.init import init_layer_from_target, start_fc_at_last_slot
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import unroll
from eagle3.errors import ProblemsError
from eagle3.serve.export import export_run
from eagle3.serve.saved_draft import load_exported, load_run
from eagle3.target.extract import run_extract
from eagle3.target.layer_tensors import read_layer
from eagle3.target.tiny import make_tiny_deepseek_v3, make_tiny_kimi, make_tiny_llama, make_tiny_qwen3
from eagle3.train.setup import make_setup
from eagle3.train.trainer import run_training
from eagle3.wiring.targets import read_target_config
from tests.unit.target.cases import extract_config, write_conversations


def target_of(folder: Path) -> TargetConfig:
    return TargetConfig(path=str(folder), dtype="float32", device="cpu")


def shape_of(folder: Path, **values: object) -> DraftConfig:
    return DraftConfig.from_target(read_target_config(folder), 3, **values)


def test_it_computes_what_the_targets_layer_does_where_the_embedding_adds_nothing(tmp_path: Path) -> None:
    folder, count, layer = make_tiny_llama(tmp_path / "target"), 12, 3
    model = DraftModel(shape_of(folder))
    model.init_weights(0)
    with torch.no_grad():
        model.fc.weight.zero_()
        start_fc_at_last_slot(model.fc)
        for name in "qkv":  # what the embedding adds
            getattr(model.midlayer.self_attn, f"{name}_proj").weight[:, : model.config.hidden_size] = 0
    init_layer_from_target(model, read_layer(target_of(folder), layer, model.config))
    ids = torch.randint(0, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
        aux = torch.cat([torch.randn(1, count, 2 * model.config.hidden_size), states[layer]], -1)
        batch = DraftBatch(
            input_ids=ids, loss_mask=torch.ones(1, count, dtype=torch.bool), aux=aux, last_hidden=states[-1][0],
            document_ids=torch.zeros(1, count, dtype=torch.int64), position_ids=torch.arange(count)[None],
            sample_ids=["a"],
        )  # fmt: skip
        plan = plan_chains(batch.loss_mask, batch.document_ids, 1, "served")
        found = next(unroll(model, batch, plan))
    chains = plan.sources[plan.chains]
    assert len(chains) == count - 2
    torch.testing.assert_close(found, states[layer + 1][0, chains], rtol=1e-4, atol=1e-5)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., TrainConfig]:
    target = make_tiny_llama(tmp_path / "target", num_hidden_layers=6)
    data = write_conversations(tmp_path / "data.jsonl", 8)
    run_extract(extract_config(target, data, tmp_path / "store", output_indices=[0, 2, 4]))

    def make(**draft: object) -> TrainConfig:
        values = {
            "dataset": str(tmp_path / "store"),
            "output": str(tmp_path / "run"),
            "output_indices": [0, 2, 4],
            "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
            "mixed_precision": "no",
            "ttt": {"steps": 2},
            "max_steps": 2,
            "draft": {"init": "target_layer", **draft},
        }
        return build_config(TrainConfig, values, "test")

    return make


def test_a_run_starts_from_the_last_layer_and_from_another_if_asked(config: Callable[..., TrainConfig]) -> None:
    for number, values in ((5, {}), (1, {"init_layer": 1})):
        made = config(**values)
        model = make_setup(made).module.model
        assert made.target is not None
        weights = AutoModelForCausalLM.from_pretrained(made.target.path).model.layers[number].state_dict()
        layer, half = model.midlayer, model.config.hidden_size
        assert torch.equal(layer.mlp.up_proj.weight, weights["mlp.up_proj.weight"])
        assert torch.equal(layer.self_attn.k_proj.weight[:, half:], weights["self_attn.k_proj.weight"])
        assert torch.equal(layer.hidden_norm.weight, weights["input_layernorm.weight"])
        assert torch.equal(layer.post_attention_layernorm.weight, weights["post_attention_layernorm.weight"])
        assert (layer.input_layernorm.weight == 1).all()
        plain = make_setup(config(init="target_head")).module.model
        assert torch.equal(layer.self_attn.q_proj.weight[:, :half], plain.midlayer.self_attn.q_proj.weight[:, :half])
        assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
        assert torch.equal(model.fc.weight, plain.fc.weight)


def test_it_trains_resumes_and_exports_what_it_has(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    result = run_training(config())
    assert result.steps == 2 and run_training(config()).steps == 2
    embed = StoreReader(config().dataset).target_head()["embed_tokens.weight"]
    drafter = load_run(result.run).model(embed)
    assert drafter.config == make_setup(config()).module.model.config
    serve = {"run": str(result.run), "output": str(tmp_path / "export"), "dtype": "float32", "engine_version": "0.5.23"}
    exported = load_exported(export_run(build_config(ServeConfig, serve, "test")).output)
    state = exported.model(embed).state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())
    with pytest.raises(ProblemsError, match=r"draft\.init_layer is not set there, 1 now"):
        run_training(config(init_layer=1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_tiny_qwen3, r"has self_attn\.q_norm\.weight, which the drafter's layer does not"),
        (make_tiny_deepseek_v3, r"has no self_attn\.q_proj\.weight"),
        (make_tiny_kimi, r"has no self_attn\.q_proj\.weight"),
    ],
)
def test_layers_of_another_kind_are_refused(tmp_path: Path, make: Callable[..., Path], said: str) -> None:
    folder = make(tmp_path / "target", num_hidden_layers=3)
    with pytest.raises(ProblemsError, match=rf"init\.target_layer(?s:.*){said}(?s:.*)draft\.init=target_head"):
        read_layer(target_of(folder), None, shape_of(make_tiny_llama(tmp_path / "llama", num_hidden_layers=3)))


def test_other_shapes_and_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "target", num_hidden_layers=3)
    with pytest.raises(ProblemsError, match=r"mlp\.gate_proj\.weight \[\d+, \d+\], the drafter \[72, (?s:.*)down_proj"):
        read_layer(target_of(folder), None, shape_of(folder, intermediate_size=72))
    with pytest.raises(ProblemsError, match=r"draft\.init_layer: is 3, of 3 layers(?s:.*)0 to 2"):
        read_layer(target_of(folder), 3, shape_of(folder))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"draft": {"init": "target_layer"}}, "target_layer without target"),
        ({"draft": {"init_layer": 2}}, "init_layer=2 without"),
    ],
)
def test_keys_that_lack_another_are_refused(values: dict[str, object], said: str) -> None:
    needed = {"dataset": "a", "output": "b", "output_indices": [0, 2, 4]}
    with pytest.raises(ProblemsError, match=said):
        build_config(TrainConfig, {**needed, **values}, "test")

"""Names, frozen embedding, starts, and strict loading."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError

from .cases import HIDDEN, VOCAB, make_config, make_model, make_vocab

# What SGLang's loader reads (sglang/srt/models/llama_eagle3.py), without d2t and t2d.
SGLANG_NAMES = {
    "embed_tokens.weight": [VOCAB, HIDDEN],
    "fc.weight": [HIDDEN, 3 * HIDDEN],
    "midlayer.self_attn.q_proj.weight": [24, 2 * HIDDEN],
    "midlayer.self_attn.k_proj.weight": [12, 2 * HIDDEN],
    "midlayer.self_attn.v_proj.weight": [12, 2 * HIDDEN],
    "midlayer.self_attn.o_proj.weight": [HIDDEN, 24],
    "midlayer.mlp.gate_proj.weight": [24, HIDDEN],
    "midlayer.mlp.up_proj.weight": [24, HIDDEN],
    "midlayer.mlp.down_proj.weight": [HIDDEN, 24],
    "midlayer.input_layernorm.weight": [HIDDEN],
    "midlayer.hidden_norm.weight": [HIDDEN],
    "midlayer.post_attention_layernorm.weight": [HIDDEN],
    "norm.weight": [HIDDEN],
    "lm_head.weight": [10, HIDDEN],
}


def test_state_dict_has_exactly_the_names_and_shapes_that_sglang_reads() -> None:
    model = make_model()
    assert {name: list(value.shape) for name, value in model.state_dict().items()} == SGLANG_NAMES


def test_norms_before_fc_have_the_names_and_shapes_that_sglang_reads_and_are_trained() -> None:
    model = make_model(make_config(fc_norm=True, norm_before_fc=True))
    norms = {f"fc_norm.{slot}.weight": [HIDDEN] for slot in range(3)} | {"input_norm.weight": [3 * HIDDEN]}
    assert {name: list(value.shape) for name, value in model.state_dict().items()} == SGLANG_NAMES | norms
    assert norms.keys() < model.trainable_state().keys()
    counted = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert model.config.parameter_counts()["trainable"] == counted


def test_only_the_embedding_is_frozen_and_left_out_of_the_trainable_state() -> None:
    model = make_model()
    assert [name for name, value in model.named_parameters() if not value.requires_grad] == ["embed_tokens.weight"]
    assert set(model.trainable_state()) == SGLANG_NAMES.keys() - {"embed_tokens.weight"}


def test_one_seed_gives_one_start() -> None:
    models = [DraftModel(make_config()) for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        model.init_weights(seed)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in SGLANG_NAMES)
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])
    assert states[0]["fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert states[0]["norm.weight"].eq(1).all()


def test_start_from_the_target_takes_embedding_norm_and_the_heads_rows_of_the_draft_vocab() -> None:
    model, vocab = make_model(), make_vocab()
    embed, norm, head = torch.randn(VOCAB, HIDDEN), torch.randn(HIDDEN), torch.randn(VOCAB, HIDDEN)
    model.init_from_target(embed, norm, head, vocab)
    state = model.state_dict()
    assert torch.equal(state["embed_tokens.weight"], embed.double()) and torch.equal(
        state["norm.weight"], norm.double()
    )
    assert all(torch.equal(state["lm_head.weight"][d], head[t].double()) for d, t in enumerate(vocab.ids.tolist()))
    assert not model.embed_tokens.weight.requires_grad and model.lm_head.weight.requires_grad
    head.zero_()
    assert state["lm_head.weight"].any(), "a copy: a tied target's embedding must not change with the draft's head"


def test_embedding_alone_leaves_norm_and_head() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_from_target(torch.zeros(VOCAB, HIDDEN), None, None, make_vocab())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name[:5] != "embed")
    assert not model.embed_tokens.weight.any()


def test_tensors_of_another_target_are_refused_and_nothing_is_copied() -> None:
    model = make_model()
    before = model.embed_tokens.weight.clone()
    with pytest.raises(ProblemsError) as error:
        model.init_from_target(
            torch.zeros(VOCAB, HIDDEN), torch.ones(HIDDEN + 1), torch.ones(VOCAB, HIDDEN), DraftVocab.full(VOCAB)
        )
    assert [problem.where for problem in error.value.problems] == ["norm.weight", "lm_head.weight"]
    assert torch.equal(model.embed_tokens.weight, before)


def test_trainable_state_loads_back_and_anything_else_is_refused_whole() -> None:
    source, model = make_model(seed=1), make_model(seed=2)
    model.load_trainable_state({name: value.clone() for name, value in source.trainable_state().items()})
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.trainable_state().items())
    broken = {name: torch.zeros_like(value) for name, value in source.trainable_state().items()}
    del broken["fc.weight"]
    broken["norm.weight"] = torch.zeros(HIDDEN + 1)
    broken["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    with pytest.raises(ProblemsError) as error:
        model.load_trainable_state(broken)
    assert {(problem.where, problem.kind) for problem in error.value.problems} == {
        ("fc.weight", "draft.state.missing"),
        ("norm.weight", "draft.state.shape"),
        ("embed_tokens.weight", "draft.state.unknown"),
    }
    assert all(value.any() for value in model.trainable_state().values())

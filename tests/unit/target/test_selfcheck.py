"""The self-check passes for right states in every type, and refuses planted faults, each by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle3.draft.loss import TargetHead
from eagle3.errors import ProblemsError
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.target.selfcheck import pick_samples, self_check
from eagle3.target.spec import TargetSpec
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine

TinyTarget = Callable[[str], Path]
IDS = ["a", "b", "c"]


def head_of(engine: TransformersEngine) -> TargetHead:
    tensors = engine.spec.head_tensors(engine.model)
    lm_head = tensors.get("lm_head.weight", tensors["embed_tokens.weight"])
    eps = engine.model.config.rms_norm_eps
    return TargetHead(lm_head, tensors["norm.weight"], eps, engine.last_hidden_states)


def kinds(engine: TransformersEngine, head: TargetHead, store_dtype: torch.dtype = torch.float32) -> set[str]:
    with pytest.raises(ProblemsError) as caught:
        self_check(engine, IDS, SHARED_PREFIX_BATCH, head, store_dtype)
    assert {problem.where for problem in caught.value.problems} == set(IDS)
    return {problem.kind for problem in caught.value.problems}


@pytest.mark.parametrize("store_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_right_states_pass(
    tiny_target: TinyTarget, name: str, kind: str, compute: str, store_dtype: torch.dtype
) -> None:
    engine = make_engine(tiny_target(name), [-1, 2, 5], kind, dtype=compute)
    self_check(engine, IDS, SHARED_PREFIX_BATCH, head_of(engine), store_dtype)


def test_right_states_of_a_deep_target_pass(tiny_target: TinyTarget) -> None:
    for compute in ("float32", "bfloat16"):
        engine = make_engine(tiny_target("kimi"), [2, 30, 58, 60], "pre_norm", dtype=compute)
        self_check(engine, IDS, SHARED_PREFIX_BATCH, head_of(engine), getattr(torch, compute))


@pytest.mark.parametrize("store_dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_head_is_refused(tiny_target: TinyTarget, store_dtype: torch.dtype) -> None:
    engine = make_engine(tiny_target("llama"), [1, 4])
    head = head_of(engine)
    rolled = replace(head, lm_head=head.lm_head.roll(1, dims=0))
    assert kinds(engine, rolled, store_dtype) == {"selfcheck.logits"}
    embedding = engine.spec.head_tensors(engine.model)["embed_tokens.weight"]
    assert kinds(engine, replace(head, lm_head=embedding), store_dtype) == {"selfcheck.logits"}
    assert kinds(engine, replace(head, lm_head=head.lm_head[:-1]), store_dtype) == {"selfcheck.logits"}


@pytest.mark.parametrize("store_dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_or_doubled_norm_is_refused(tiny_target: TinyTarget, store_dtype: torch.dtype) -> None:
    raw = make_engine(tiny_target("llama"), [1, 4], "pre_norm")
    assert kinds(raw, replace(head_of(raw), kind="post_norm"), store_dtype) == {"selfcheck.logits"}
    normed = make_engine(tiny_target("llama"), [1, 4], "post_norm")
    assert kinds(normed, replace(head_of(normed), kind="pre_norm"), store_dtype) == {"selfcheck.logits"}


def test_another_norm_weight_or_epsilon_is_refused(tiny_target: TinyTarget) -> None:
    engine = make_engine(tiny_target("llama"), [1, 4], "pre_norm")
    head = head_of(engine)
    ones = torch.ones_like(head.norm_weight)
    assert kinds(engine, replace(head, norm_weight=ones), torch.bfloat16) == {"selfcheck.logits"}
    assert kinds(engine, replace(head, eps=0.5)) == {"selfcheck.logits"}


class OneLate(TargetSpec):
    """A hook on the layer after the one that was meant."""

    def decoder_layers(self, model: PreTrainedModel) -> Sequence[nn.Module]:
        return list(super().decoder_layers(model))[1:]


@pytest.mark.parametrize("store_dtype", [torch.float32, torch.bfloat16])
def test_a_hook_on_the_wrong_layer_is_refused_and_named(tiny_target: TinyTarget, store_dtype: torch.dtype) -> None:
    engine = make_engine(tiny_target("llama"), [1, 4])
    engine.spec = OneLate("llama")
    with pytest.raises(ProblemsError) as caught:
        self_check(engine, IDS, SHARED_PREFIX_BATCH, head_of(engine), store_dtype)
    assert {problem.kind for problem in caught.value.problems} == {"selfcheck.aux"}
    assert "output index 1 holds hidden_states[3], expected hidden_states[2]" in str(caught.value)


def test_swapped_slots_and_a_normed_last_layer_are_refused(
    tiny_target: TinyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_target("llama"), [1, 7], "pre_norm")
    right = engine._captures

    def swapped(batch: Sequence[Sequence[int]], taken: dict) -> list:
        return right(batch, {**taken, 1: taken[7], 7: taken[1]})

    monkeypatch.setattr(engine, "_captures", swapped)
    assert kinds(engine, head_of(engine)) == {"selfcheck.aux"}

    def normed(batch: Sequence[Sequence[int]], taken: dict) -> list:
        return right(batch, {**taken, 7: engine.normed(taken[7])})

    monkeypatch.setattr(engine, "_captures", normed)
    assert kinds(engine, head_of(engine)) == {"selfcheck.aux"}


def test_states_that_overflow_the_stored_type_are_refused(tiny_target: TinyTarget) -> None:
    engine = make_engine(tiny_target("llama"), [1, 4], "pre_norm")
    with torch.no_grad():
        engine.model.model.layers[7].mlp.down_proj.weight.mul_(1e6)
    assert kinds(engine, head_of(engine), torch.float16) == {"selfcheck.logits"}


def test_the_chosen_samples_span_all_lengths() -> None:
    assert pick_samples([5, 9, 3]) == [2, 0, 1]
    chosen = pick_samples([4] * 50 + [100, 1])
    assert len(chosen) == 4
    assert chosen[0] == 51 and chosen[-1] == 50
    assert pick_samples([8]) == [0]

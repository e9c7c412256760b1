"""The target's greedy tokens are those of the whole head, one sample at a time, and of equals the lowest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.data import target_argmax
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.target_argmax import greedy_tokens, make_target_head, with_argmax
from eagle3.draft.loss import LastHiddenKind, TargetHead

from .cases import HIDDEN, contract, layout, sample

EPS = 1e-3


def head_of(vocab: int = 50, kind: LastHiddenKind = "post_norm", dtype: torch.dtype = torch.float32) -> TargetHead:
    generator = torch.Generator().manual_seed(1)
    weight, norm = torch.randn(vocab, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    return TargetHead(weight.to(dtype), norm.to(dtype), EPS, kind)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_they_are_the_argmax_of_all_logits_in_float64(
    monkeypatch: pytest.MonkeyPatch, kind: LastHiddenKind, count: int
) -> None:
    monkeypatch.setattr(target_argmax, "BLOCK_ROWS", 5)
    head, states = head_of(kind=kind), rows(count)
    wide = states.double()
    if kind == "pre_norm":
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * head.norm_weight.double()
    found = greedy_tokens(states, head)
    assert found.dtype == torch.int64
    assert found.tolist() == (wide @ head.lm_head.double().T).argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_id_is_taken(dtype: torch.dtype) -> None:
    """In 16 bits many are equal."""
    head = head_of(40, dtype=dtype)
    twice = replace(head, lm_head=torch.cat([head.lm_head, head.lm_head, head.lm_head]))
    states = rows(200).to(dtype)
    assert torch.equal(greedy_tokens(states, twice), greedy_tokens(states, head))
    logits = head.logits(states)
    for row, token in zip(logits, greedy_tokens(states, head).tolist(), strict=True):
        assert token == int((row == row.max()).nonzero()[0])


def test_no_more_rows_than_a_block_have_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, logits = [], TargetHead.logits

    def counted(self: TargetHead, states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return logits(self, states)

    monkeypatch.setattr(TargetHead, "logits", counted)
    greedy_tokens(rows(2500), head_of())
    assert sizes == [1024, 1024, 452]


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_sample_gets_those_of_the_rows_that_are_stored_before_eight_bits_round_them(
    dtype: str, last_rows: LastRows
) -> None:
    of, head = layout(last_rows, dtype=dtype), head_of()
    states = rows(9)
    item = replace(sample("s", 9), last_hidden_states=states, target_argmax=None)
    made = with_argmax(item, of, head)
    stored = states if last_rows == "all" else states[item.loss_mask]
    assert made.target_argmax is not None and made.target_argmax.dtype == torch.int32
    expected = (stored.to(of.value_dtype).double() @ head.lm_head.double().T).argmax(-1)
    assert made.target_argmax.tolist() == expected.tolist()


def test_what_is_there_stays_and_an_old_layout_gets_none() -> None:
    item = sample("s")
    assert with_argmax(item, layout(), head_of()) is item
    bare = replace(item, target_argmax=None)
    assert with_argmax(bare, StoreLayout(contract(), version=2), head_of()) is bare


def test_a_tied_head_is_the_embedding() -> None:
    tensors = {"embed_tokens.weight": torch.ones(3, HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    made = make_target_head(tensors, {"rms_norm_eps": EPS}, "pre_norm")
    assert made.lm_head is tensors["embed_tokens.weight"] and (made.eps, made.kind) == (EPS, "pre_norm")
    other = torch.zeros(3, HIDDEN)
    assert make_target_head({**tensors, "lm_head.weight": other}, {"rms_norm_eps": EPS}, "post_norm").lm_head is other

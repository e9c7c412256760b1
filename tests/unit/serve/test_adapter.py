from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from eagle3.draft.config import DraftConfig
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError
from eagle3.serve.adapter import from_exported, to_exported, trained_shapes

from .cases import DRAFT_IDS, HIDDEN, VOCAB, kinds, make_state, make_target_config

CONFIG = DraftConfig.from_target(make_target_config(), 3, draft_vocab_size=len(DRAFT_IDS), head_dim=6)
TABLE = DraftVocab(torch.tensor(DRAFT_IDS), VOCAB)
EMBEDDING = torch.randn(VOCAB, HIDDEN)


def exported(state: Mapping[str, torch.Tensor], **values: Any) -> dict[str, torch.Tensor]:
    settings = {"dtype": torch.bfloat16, "embedding": None, "where": "test"}
    return to_exported(state, CONFIG, TABLE, **{**settings, **values})


def test_round_trip_keeps_every_weight_and_the_vocab() -> None:
    state = make_state(CONFIG)
    back, vocab = from_exported(exported(state, dtype=torch.float32, embedding=EMBEDDING), CONFIG, "test")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert vocab.digest == TABLE.digest


def test_only_weights_are_cast() -> None:
    tensors = exported(make_state(CONFIG), embedding=EMBEDDING)
    assert {str(value.dtype) for name, value in tensors.items() if name in trained_shapes(CONFIG)} == {"torch.bfloat16"}
    assert torch.equal(tensors["embed_tokens.weight"], EMBEDDING)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_everything_wrong_with_a_state_is_listed_at_once() -> None:
    state = make_state(CONFIG)
    del state["fc.weight"]
    state["fc_norm.0.weight"] = torch.ones(HIDDEN)
    state["norm.weight"] = torch.ones(HIDDEN + 1)
    state["lm_head.weight"][3, 4] = torch.nan
    state["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN, dtype=torch.int64)
    with pytest.raises(ProblemsError) as caught:
        exported(state)
    expected = {"tensor.missing", "tensor.extra", "tensor.shape", "tensor.not_finite", "tensor.dtype"}
    assert set(kinds(caught.value)) == expected and len(caught.value.problems) == 5


def test_a_value_that_overflows_in_the_export_type_is_refused() -> None:
    state = make_state(CONFIG)
    state["lm_head.weight"][0, 0] = 1e6
    assert exported(state, dtype=torch.bfloat16)
    with pytest.raises(ProblemsError, match=r"lm_head\.weight holds 1 NaN or infinite values as torch\.float16"):
        exported(state, dtype=torch.float16)


def test_an_embedding_of_another_width_is_refused() -> None:
    with pytest.raises(ProblemsError, match=r"embed_tokens\.weight has shape"):
        exported(make_state(CONFIG), embedding=EMBEDDING[:, 1:])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"d2t": None}, "tensor.missing"),
        ({"t2d": None}, "tensor.missing"),
        ({"lm_head.weight": None}, "tensor.missing"),
        ({"other": torch.ones(1)}, "tensor.extra"),
        ({"fc.weight": torch.ones(HIDDEN, HIDDEN)}, "tensor.shape"),
        ({"norm.weight": torch.full((HIDDEN,), torch.inf)}, "tensor.not_finite"),
        ({"d2t": TABLE.d2t.to(torch.int32)}, "draft_vocab.d2t"),
        ({"d2t": TABLE.ids}, "draft_vocab.absolute_ids"),
        ({"t2d": TABLE.t2d.float()}, "draft_vocab.t2d"),
    ],
)
def test_reading_back_is_as_strict(change: dict[str, torch.Tensor | None], kind: str) -> None:
    tensors = {**exported(make_state(CONFIG)), **change}
    with pytest.raises(ProblemsError) as caught:
        from_exported({name: value for name, value in tensors.items() if value is not None}, CONFIG, "test")
    assert kinds(caught.value) == [kind]

"""What SGLang's loader does with a wrong checkpoint, row by row: each is a named problem here.

Measured with SGLang 0.5.23; the id of each case is the fault, its comment what the server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.wiring import check_checkpoint
from tests.unit.wiring.cases import DRAFT_IDS, HIDDEN, VOCAB, kinds, write_checkpoint

WIDER = {
    "fc.weight": torch.ones(HIDDEN, 3 * HIDDEN + 1),
    "midlayer.self_attn.q_proj.weight": torch.ones(HIDDEN, HIDDEN),
    "lm_head.weight": torch.ones(len(DRAFT_IDS), HIDDEN + 1),
}

ROWS = {
    # silent; the parameter stays uninitialised
    "a missing tensor: fc": ({}, {"fc.weight": None}, "tensor.missing"),
    "a missing tensor: any other": ({}, {"midlayer.mlp.up_proj.weight": None}, "tensor.missing"),
    # silently ignored
    "an unknown tensor name": ({}, {"surprise.weight": torch.ones(1)}, "tensor.extra"),
    # no error; acceptance length 3.08 -> 1.21
    "d2t missing": ({}, {"d2t": None}, "tensor.missing"),
    # loads; the server dies at the first request
    "d2t holds absolute ids": ({}, {"d2t": torch.tensor(DRAFT_IDS)}, "draft_vocab.absolute_ids"),
    # assertion
    **{f"{name} of the wrong width": ({}, {name: tensor}, "tensor.shape") for name, tensor in WIDER.items()},
    # silently the default layers
    "eagle_config missing": ({"eagle_config": None}, {}, "layer_ids.missing"),
    "eagle_config malformed": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "3"}}, {}, "layer_ids.type"),
    # the draft's head is replaced
    "tie_word_embeddings=true": ({"tie_word_embeddings": True}, {}, "config.tie_word_embeddings"),
    "draft_vocab_size is None": ({"draft_vocab_size": None}, {}, "config.size"),
    # FAULTS 18: an embedding of the wrong shape; absent is right
    "fault 18: embed_tokens of another vocab": (
        {},
        {"embed_tokens.weight": torch.ones(VOCAB + 1, HIDDEN)},
        "tensor.shape",
    ),
    # FAULTS 23 (a): acceptance length 1.00 behind a healthy server
    "fault 23: the promised head is absent": ({}, {"lm_head.weight": None}, "tensor.missing"),
    # FAULTS 19: tables lost or cast
    "fault 19: t2d missing": ({}, {"t2d": None}, "tensor.missing"),
    "fault 19: d2t cast to bf16": ({}, {"d2t": torch.zeros(4, dtype=torch.bfloat16)}, "tensor.dtype"),
    # FAULTS 22: boundaries where output indices were meant, or the reverse
    "fault 22: one layer early": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
        {},
        "wiring.one_early",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "kind"), ROWS.values(), ids=ROWS)
def test_each_wrong_checkpoint_is_one_named_problem(
    tmp_path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None], kind: str
) -> None:
    assert kinds(check_checkpoint(write_checkpoint(tmp_path, config=config, tensors=tensors))) == [kind]


def test_eagle_config_that_is_no_object_is_named_besides_the_missing_ids(tmp_path: Path) -> None:
    found = kinds(check_checkpoint(write_checkpoint(tmp_path, config={"eagle_config": "x"})))

    assert found == ["config.eagle_config", "layer_ids.missing"]


def test_an_embedding_that_is_needed_because_the_widths_differ(tmp_path: Path) -> None:
    """SGLang keeps the draft's own embedding only where `target_hidden_size` differs from `hidden_size`."""
    config = {"target_hidden_size": 2 * HIDDEN}
    fc = {"fc.weight": torch.ones(HIDDEN, 6 * HIDDEN)}

    found = kinds(check_checkpoint(write_checkpoint(tmp_path, config=config, tensors=fc)))

    assert found == ["tensor.missing", "contract.hidden_size"]

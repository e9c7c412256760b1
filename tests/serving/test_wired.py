"""A whole SGLang engine feeds a drafter what it was trained on exactly when it has the ids that we export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.target.tiny import make_tiny_deepseek_v3, make_tiny_kimi, make_tiny_llama
from eagle3.wiring import LayerWiring, ids_to_write
from tests.serving.conftest import EngineScript
from tests.serving.constructed import acceptance_length, make_export, make_target, prompts, with_ids
from tests.serving.sglang_venv import SERVED_VERSION

WIRING = LayerWiring((2, 4, 6), 10)
STEPS, ROUNDS = 3, 6
SMALL_EXPERTS = {"moe_intermediate_size": 64, "max_position_embeddings": 4096}
Lists = dict[str, Sequence[int] | None]


def lengths_by_slot(
    engine: EngineScript,
    folder: Path,
    maker: Callable[..., Path],
    lists: Lists,
    wiring: LayerWiring = WIRING,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, list[float]]:
    """Acceptance length of an answer in each slot's circle, for each list of ids."""
    target = make_target(folder / "target", maker, wiring, hidden_size=128, **config)
    export = make_export(folder / "export", target, wiring, SERVED_VERSION)
    request = {
        "target": target,
        "drafters": [with_ids(export, folder / name, ids) for name, ids in lists.items()],
        "steps": STEPS,
        "prompts": prompts(wiring.num_aux),
        "max_new_tokens": 1 + ROUNDS * (STEPS + 1),
        "options": options or {},
    }
    replies = engine("generate", request, timeout=60 + 90 * len(lists))
    return {
        name: [acceptance_length([reply["meta_info"]]) for reply in answers]
        for name, answers in zip(lists, replies, strict=True)
    }


@pytest.mark.timeout(600)
def test_a_llama_is_wired_right_with_our_ids_only(engine: EngineScript, tmp_path: Path) -> None:
    ids = ids_to_write(WIRING, "sglang", SERVED_VERSION, "llama").ids
    lists: Lists = {
        "ours": ids,
        "early, late, right": (ids[0] - 1, ids[1] + 1, ids[2]),
        "right, early, late": (ids[0], ids[1] - 1, ids[2] + 1),
        "none": None,  # SGLang then captures boundaries 2, N // 2, N - 3, here 2, 5, 7
    }

    assert lengths_by_slot(engine, tmp_path, make_tiny_llama, lists) == {
        "ours": [4.0, 4.0, 4.0],
        "early, late, right": [1.0, 1.0, 4.0],
        "right, early, late": [4.0, 1.0, 1.0],
        "none": [1.0, 4.0, 4.0],
    }


@pytest.mark.timeout(600)
def test_a_deepseek_v3_is_wired_right_with_our_ids_only(engine: EngineScript, tmp_path: Path) -> None:
    lists: Lists = {
        "ours": ids_to_write(WIRING, "sglang", SERVED_VERSION, "deepseek").ids,
        "as before 0.5.13": ids_to_write(WIRING, "sglang", "0.5.12.post1", "deepseek").ids,
        "right, early, late": (3, 4, 8),
    }

    assert lengths_by_slot(engine, tmp_path, make_tiny_deepseek_v3, lists, **SMALL_EXPERTS) == {
        "ours": [4.0, 4.0, 4.0],
        "as before 0.5.13": [1.0, 1.0, 1.0],
        "right, early, late": [4.0, 1.0, 1.0],
    }


@pytest.mark.timeout(600)
def test_a_kimi_counts_one_on_if_the_first_id_is_1_and_only_then(engine: EngineScript, tmp_path: Path) -> None:
    wiring = LayerWiring((1, 3, 5), 10)
    lists: Lists = {
        "ours": ids_to_write(wiring, "sglang", SERVED_VERSION, "kimi_k25").ids,
        "boundaries": wiring.boundaries,
        "first id 1, not the others": (1, 4, 6),
    }
    text_only = {"enable_multimodal": False}

    found = lengths_by_slot(engine, tmp_path, make_tiny_kimi, lists, wiring, text_only, **SMALL_EXPERTS)

    assert lists["ours"] == (1, 3, 5)
    assert found == {
        "ours": [4.0, 4.0, 4.0],
        "boundaries": [4.0, 4.0, 4.0],
        "first id 1, not the others": [4.0, 1.0, 1.0],
    }


@pytest.mark.timeout(600)
def test_latent_attention_and_experts_answer_as_in_transformers(engine: EngineScript, tmp_path: Path) -> None:
    """The constructed targets' attention and routed experts add nothing; this random target's do."""
    target = make_tiny_deepseek_v3(tmp_path / "target", max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    asked = torch.randint(0, 500, (4, 12), generator=torch.Generator().manual_seed(0))
    greedy = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(asked, attention_mask=torch.ones_like(asked), **greedy)[:, 12:].tolist()

    (answers,) = engine("generate", {"target": target, "prompts": asked.tolist(), "max_new_tokens": 24})

    assert [answer["output_ids"] for answer in answers] == expected

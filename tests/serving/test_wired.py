"""A whole SGLang engine feeds a drafter what it was trained on exactly when it has the ids that we export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring import LayerWiring, ids_to_write
from tests.serving.conftest import EngineScript
from tests.serving.constructed import acceptance_length, make_export, make_target, prompts, with_ids
from tests.serving.sglang_venv import SERVED_VERSION

WIRING = LayerWiring((2, 4, 6), 10)
STEPS, ROUNDS = 3, 6


def lengths_by_slot(
    engine: EngineScript, folder: Path, maker: Callable[..., Path], lists: dict[str, Sequence[int] | None]
) -> dict[str, list[float]]:
    """Acceptance length of an answer in each slot's circle, for each list of ids."""
    target = make_target(folder / "target", maker, WIRING, hidden_size=128)
    export = make_export(folder / "export", target, WIRING, SERVED_VERSION)
    drafters = [with_ids(export, folder / name, ids) for name, ids in lists.items()]
    request = {
        "target": target,
        "drafters": drafters,
        "steps": STEPS,
        "prompts": prompts(WIRING.num_aux),
        "max_new_tokens": 1 + ROUNDS * (STEPS + 1),
    }
    replies = engine("generate", request, timeout=60 + 90 * len(lists))
    return {
        name: [acceptance_length([reply["meta_info"]]) for reply in answers]
        for name, answers in zip(lists, replies, strict=True)
    }


@pytest.mark.timeout(600)
def test_a_llama_is_wired_right_with_our_ids_only(engine: EngineScript, tmp_path: Path) -> None:
    ids = ids_to_write(WIRING, "sglang", SERVED_VERSION, "llama").ids
    lists: dict[str, Sequence[int] | None] = {
        "ours": ids,
        "early, late, right": (ids[0] - 1, ids[1] + 1, ids[2]),
        "late, right, early": (ids[0] + 1, ids[1], ids[2] - 1),
        "right, early, late": (ids[0], ids[1] - 1, ids[2] + 1),
        "none": None,  # SGLang then captures boundaries 2, N // 2, N - 3, here 2, 5, 7
    }

    assert lengths_by_slot(engine, tmp_path, make_tiny_llama, lists) == {
        "ours": [4.0, 4.0, 4.0],
        "early, late, right": [1.0, 1.0, 4.0],
        "late, right, early": [1.0, 4.0, 1.0],
        "right, early, late": [4.0, 1.0, 1.0],
        "none": [1.0, 4.0, 4.0],
    }

"""Every reading of a config.json's ids, for whoever must know what a drafter was trained on."""

from typing import Any

import pytest

from eagle3.wiring.conventions import LAYER_IDS
from eagle3.wiring.possible_layers import describe_possible, possible_layers


def nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {LAYER_IDS: list(ids)}}


@pytest.mark.parametrize(
    ("config", "family", "layers", "expected"),
    [
        (nested(2, 30, 58), "llama", 61, [(2, 30, 58)]),
        (nested(2, 30, 58), "kimi_k25", 61, [(2, 30, 58), (1, 29, 57)]),
        (nested(1, 29, 57), "deepseek", 61, [(1, 29, 57)]),
        (nested(3, 31, 59), "kimi_k25", 61, [(3, 31, 59), (2, 30, 58)]),
        ({LAYER_IDS: [3, 31, 59]}, "llama", 61, [(2, 30, 58)]),
        (nested(2, 30, 58) | {LAYER_IDS: [3, 31, 59]}, "llama", 61, [(2, 30, 58)]),
        (nested(2, 30, 58) | {LAYER_IDS: [2, 30, 58]}, "llama", 61, [(2, 30, 58), (1, 29, 57)]),
        (nested(6, 2, 4), "llama", 12, [(6, 2, 4), (2, 4, 6)]),
        (nested(2, 6, 12), "gpt_oss", 12, [(1, 5, 11)]),
        (nested(2, 30, 58), "nobody_knows", 61, [(2, 30, 58)]),
        (nested(2, 30, 61), "llama", 61, []),
        (nested(-1, 2, 4), "llama", 12, [(-1, 2, 4)]),
        (nested(-2, 2, 4), "llama", 12, []),
        (nested(2, 2, 4), "llama", 12, []),
        ({}, "llama", 12, []),
        ({"eagle_config": [1, 2]}, "kimi_k25", 61, []),
        (nested(3, 31, 59) | {"eagle3": {"output_indices": [2, 30, 58]}}, "kimi_k25", 61, [(2, 30, 58)]),
        (nested(1, 29, 57) | {"eagle3": {"output_indices": [2, 30, 99]}}, "kimi_k25", 61, [(1, 29, 57)]),
    ],
)
def test_readings(config: dict[str, Any], family: str, layers: int, expected: list[tuple[int, ...]]) -> None:
    assert list(possible_layers(config, family, layers)) == expected


def test_who_reads_them_so_is_said() -> None:
    said = describe_possible(possible_layers(nested(2, 30, 58), "kimi_k25", 61))
    assert said.startswith("the outputs of layers 2, 30, 58 by trainers that write output indices as eagle_config.")
    assert "SGLang 0.5.10 to 0.5.12.post1" in said.split("; ")[0]
    assert said.split("; ")[1].startswith("the outputs of layers 1, 29, 57 by SGLang 0.5.13 to ")


def test_servers_that_take_default_layers_read_nothing() -> None:
    readers = possible_layers(nested(2, 30, 58), "llama", 61)[2, 30, 58]
    assert not any("vLLM" in reader for reader in readers)

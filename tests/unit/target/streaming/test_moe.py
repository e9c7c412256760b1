"""The grouped mixture against a sum over experts, token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from eagle3.target.streaming.moe import ExpertGroup, mixture, route

TOKENS, SLOTS, EXPERTS, HIDDEN, WIDTH = 23, 3, 7, 12, 5


@pytest.fixture
def layer() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(EXPERTS - 1)[:SLOTS] for _ in range(TOKENS)])  # the last expert gets nothing
    return {
        "states": torch.randn(TOKENS, HIDDEN),
        "index": index,
        "weights": torch.rand(TOKENS, SLOTS),
        "gate_up": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "down": torch.randn(EXPERTS, HIDDEN, WIDTH),
        "shared": torch.randn(TOKENS, HIDDEN),
    }


def plain(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = []
    for token in range(TOKENS):
        total = layer["shared"][token].clone()
        for slot in range(SLOTS):
            expert = int(layer["index"][token, slot])
            gate, up = (layer["gate_up"][expert] @ layer["states"][token]).chunk(2)
            total += layer["weights"][token, slot] * (layer["down"][expert] @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("size", [EXPERTS, 1, 2, 6])
def test_groups_of_any_size_give_the_sum_over_experts(layer: dict[str, torch.Tensor], size: int) -> None:
    groups = [
        ExpertGroup(first, layer["gate_up"][first : first + size], layer["down"][first : first + size])
        for first in range(0, EXPERTS, size)
    ]
    expected = plain(layer)

    found = mixture(layer["states"], layer["index"], layer["weights"], groups, EXPERTS, layer["shared"])

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_sorted_by_expert_and_found_again(layer: dict[str, torch.Tensor]) -> None:
    routing = route(layer["index"], EXPERTS)
    experts = layer["index"].flatten()[torch.argsort(routing.place.flatten())]

    assert torch.equal(experts, experts.sort().values)
    assert torch.equal(routing.source[routing.place.long()], torch.arange(TOKENS)[:, None].expand(-1, SLOTS).int())
    assert routing.ends.tolist() == torch.bincount(layer["index"].flatten(), minlength=EXPERTS).cumsum(0).tolist()

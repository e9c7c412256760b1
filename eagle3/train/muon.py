"""Muon for the layer's matrices, AdamW for the rest, as one optimizer.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon; at scale: arXiv 2502.16982) steps a matrix along its
momentum with all singular values brought to about 1, by five Newton-Schulz iterations in bfloat16. It is meant for a
network's hidden matrices, and input and output layers are left to AdamW. In a drafter hidden are q, k, v, o and the
MLP's three. `lm_head` is the output layer. `fc` is the input layer: it reads the target's states as they are, whose few
outlier channels are what its gradient mostly consists of, and begins as a copy of one slot beside small noise, which a
step of equal size in every direction would drown. Norms are vectors, and the embedding is frozen.

Legend: A rows, B columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eagle3.config import OptimSection
from eagle3.draft.config import DraftConfig
from eagle3.errors import Problem
from eagle3.train.moments import is_muons

_BF16, _FLOAT32 = 2, 4


class MuonAndAdamW(torch.optim.Optimizer):
    """Both of torch's, on parameter groups and a state of one optimizer.

    Args:
        model: the drafter.
        optim: of name `muon`.
        groups: AdamW's.
        fused: of AdamW.
    """

    def __init__(self, model: nn.Module, optim: OptimSection, groups: list[dict[str, Any]], fused: bool) -> None:
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        self._muon = torch.optim.Muon(
            [value for name, value in named if is_muons(name, value.shape)],
            lr=optim.learning_rate,
            weight_decay=optim.weight_decay,
            momentum=optim.muon_momentum,
            adjust_lr_fn=optim.muon_adjust,
        )
        for group in self._muon.param_groups:
            group["rate_factor"] = (optim.muon_learning_rate or optim.learning_rate) / optim.learning_rate
        self._adamw = torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps both; loading a state has replaced groups and state."""
        assert closure is None
        self._muon.state = self._adamw.state = self.state
        self._muon.param_groups = [group for group in self.param_groups if "momentum" in group]
        self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._muon.step()
        self._adamw.step()


def check_muon(optim: OptimSection) -> list[Problem]:
    """Finds a torch without Muon."""
    if optim.name != "muon" or hasattr(torch.optim, "Muon"):
        return []
    fix = "install torch 2.9 or later, or use optim.name=adamw"
    return [Problem("optim.name", "train.muon", f"is muon, which torch {torch.__version__} does not have", fix)]


def muon_workspace(config: DraftConfig) -> int:
    """Bytes that a step takes besides, of the matrix that takes most: its update in float32, and in bfloat16 two
    iterates and two squares of its smaller side."""
    hidden, head = config.hidden_size, config.head_dim
    shapes = [
        (config.num_attention_heads * head, 2 * hidden),
        (config.num_key_value_heads * head, 2 * hidden),
        (hidden, config.num_attention_heads * head),
        (config.intermediate_size, hidden),
    ]
    return max(a * b * (_FLOAT32 + 2 * _BF16) + 2 * min(a, b) ** 2 * _BF16 for a, b in shapes)

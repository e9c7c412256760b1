"""The drafter's weights as the fused step reads them, and their gradients.

q, k and v are one matrix whose columns are two halves: the embedding's and the hidden state's.

Shapes: H hidden, q the width of all queries, p that of all keys and values, I MLP width, D draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from eagle3.draft.config import DraftConfig
from eagle3.draft.fused.gemm import sum_up
from eagle3.draft.fused.products import Float8Products, PlainProducts, Products
from eagle3.draft.model import DraftModel

MATRICES = ("o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
NAMES = (*_PROJECTIONS, *MATRICES, *NORMS)
"""Every parameter that the fused step uses, in the order of `parameters_of`."""


def parameters_of(model: DraftModel) -> list[torch.nn.Parameter]:
    """The parameters in `NAMES`."""
    attention, mlp, layer = model.midlayer.self_attn, model.midlayer.mlp, model.midlayer
    owners = {
        **{name: attention for name in (*_PROJECTIONS, "o_proj")},
        **{name: mlp for name in ("gate_proj", "up_proj", "down_proj")},
        **{name: layer for name in NORMS[:3]},
        **{name: model for name in ("norm", "lm_head")},
    }
    return [getattr(owners[name], name).weight for name in NAMES]


@dataclass(frozen=True, eq=False)
class Halves:
    """A matrix [q + p, 2H] of q, k and v, or its gradient; the parts are views.

    Attributes:
        whole: the matrix.
        query_width: q.
        hidden: H.
    """

    whole: torch.Tensor
    query_width: int
    hidden: int

    @property
    def embedded_query(self) -> torch.Tensor:
        return self.whole[: self.query_width, : self.hidden]

    @property
    def embedded_pair(self) -> torch.Tensor:
        return self.whole[self.query_width :, : self.hidden]

    @property
    def hidden_query(self) -> torch.Tensor:
        return self.whole[: self.query_width, self.hidden :]

    @property
    def hidden_pair(self) -> torch.Tensor:
        return self.whole[self.query_width :, self.hidden :]

    @property
    def hidden_all(self) -> torch.Tensor:
        return self.whole[:, self.hidden :]


@dataclass(frozen=True, eq=False)
class Weights:
    """Matrices as the step multiplies with them; norms as they are.

    Attributes:
        qkv: the projections, in the type to compute in.
        products: with the matrices of `MATRICES`, and with qkv's hidden half as `hidden_all`, its part that makes
            queries as `hidden_query`.
        norms: by the names of `NORMS`.
    """

    qkv: Halves
    products: Products
    norms: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, config: DraftConfig, parameters: list[torch.Tensor], dtype: torch.dtype, ops: ModuleType, float8: bool
    ) -> Weights:
        """Of parameters in the order of `NAMES`.

        Args:
            dtype: to compute in.
            ops: `plain` or `cuda`.
            float8: multiply chains' rows in float8.
        """
        named = dict(zip(NAMES, parameters, strict=True))
        whole = torch.cat([named[name].to(dtype) for name in _PROJECTIONS])
        qkv = Halves(whole, len(named["q_proj"]), config.hidden_size)
        matrices = {name: named[name] if float8 else named[name].to(dtype) for name in MATRICES}
        matrices["hidden_all"] = qkv.hidden_all
        norms = {name: named[name] for name in NORMS}
        if not float8:
            return cls(qkv, PlainProducts(ops, matrices | {"hidden_query": qkv.hidden_query}), norms)
        products = Float8Products(ops, matrices, dtype)
        products.add_part("hidden_query", "hidden_all", qkv.query_width)
        return cls(qkv, products, norms)


class KeptWeights:
    """The weights' copies, made for each batch, or once while `keeping`.

    Args:
        float8: see `Weights.of`.
    """

    def __init__(self, float8: bool) -> None:
        self.float8 = float8
        self._keeps = False
        self._kept: Weights | None = None

    def get(self, make: Callable[[], Weights]) -> Weights:
        """What is kept, or what `make` makes."""
        if not self._keeps:
            return make()
        if self._kept is None:
            self._kept = make()
        return self._kept

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within, the weights do not change."""
        assert not self._keeps
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None


class Gradients:
    """Gradients of the weights, added up.

    Args:
        weights: of the step.
        parameters: the parameters themselves, whose type their gradients get.
        ops: `plain` or `cuda`.
    """

    def __init__(
        self,
        weights: Weights,
        parameters: list[torch.Tensor],
        ops: ModuleType,
    ) -> None:
        self._ops = ops
        self._named = dict(zip(NAMES, parameters, strict=True))
        self._products = weights.products
        whole = torch.empty_like(weights.qkv.whole, dtype=self._named["q_proj"].dtype)
        self.qkv = Halves(whole, weights.qkv.query_width, weights.qkv.hidden)
        self._totals = {name: torch.empty_like(self._named[name]) for name in MATRICES}
        self._totals["hidden_all"] = self.qkv.hidden_all
        self._begun: set[str] = set()
        example = weights.qkv.whole
        self.norm_sums = {name: ops.norm_sums(len(self._named[name]), example) for name in NORMS}

    def add(self, name: str, grad: Any, rows: Any) -> None:
        """Adds grad [N, out]^T times rows [N, in], both from `Operand.columns`, to a matrix of `MATRICES` or
        `hidden_all`."""
        self._products.add_gradient(self._totals[name], name, grad, rows, name in self._begun)
        self._begun.add(name)

    def add_pair(self, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds grad [S, p]^T times rows [S, H] to the part of `hidden_all` that keys and values have; after `add`."""
        sum_up(self.qkv.hidden_pair, grad, rows, True)

    def add_embedded(
        self, weights: Weights, query: tuple[torch.Tensor, torch.Tensor], pair: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """The embedding's half and its norm, from (gradient [.., out], normed rows before the norm's weight [.., H]).

        One product gives both: with G = grad^T rows, the matrix's gradient is G times the norm's weight, and that
        weight's is the sum over the outputs of G times the matrix.
        """
        norm = weights.norms["input_layernorm"]
        sums = self.norm_sums["input_layernorm"]
        for total, matrix, (grad, rows) in (
            (self.qkv.embedded_query, weights.qkv.embedded_query, query),
            (self.qkv.embedded_pair, weights.qkv.embedded_pair, pair),
        ):
            sum_up(total, grad, rows, False)
            self._ops.unnormed_grad(total, matrix, norm, sums)

    def in_order(self) -> list[torch.Tensor]:
        """In the order of `NAMES`, in the parameters' types."""
        parts = self.qkv.whole.split([len(self._named[name]) for name in _PROJECTIONS])
        found = dict(zip(_PROJECTIONS, parts, strict=True))
        found |= {name: self._totals[name] for name in MATRICES}
        found |= {name: self.norm_sums[name].sum(0).to(self._named[name].dtype) for name in NORMS}
        return [found[name] for name in NAMES]

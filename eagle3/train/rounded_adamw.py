"""AdamW (arXiv 1711.05101) that computes in float32 and stores its moments rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle3.train.moments import BLOCK, moment_layout
from eagle3.train.rounding import from_float8, make_keys, random_bits, root_to_float8, to_bfloat16, to_float8

_PIECE = 1 << 20
"""Elements that the plain step takes at a time; a multiple of BLOCK."""
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Coefficients:
    """Numbers of one step, each rounded to float32.

    The step is `weight * decay - size * first / (sqrt(second) * correction + eps)`.

    Attributes:
        decay: 1 - learning rate * weight decay.
        beta1, rest1: the first moment's beta, and 1 - beta1.
        beta2, rest2: the second moment's.
        size: learning rate / (1 - beta1^step).
        correction: 1 / sqrt(1 - beta2^step).
        eps: added to the denominator.
    """

    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    size: float
    correction: float
    eps: float

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Coefficients:
        (beta1, beta2), rate = group["betas"], group["lr"]
        size, correction = rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
        values = (1 - rate * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, size, correction, group["eps"])
        return cls(*(float(np.float32(value)) for value in values))


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose state is laid out as `moment_layout` says.

    A parameter's number, which its random bits depend on, is its place in the groups. On a GPU one kernel a parameter
    does the whole step; parameters with float32 moments, and all on a CPU, take the plain step.

    Args:
        params: parameters or groups of them; float32 and contiguous.
        moments: type of the stored moments.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Literal["bfloat16", "float8"],
    ) -> None:
        self.moments = moments
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype == torch.float32 and parameter.is_contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "the loss is not evaluated again"
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in enumerate(pairs):
            if parameter.grad is None:
                continue
            state = self.state[parameter] or self._start(parameter)
            state["step"] += 1
            step = int(state["step"])
            rounded = state["exp_avg"].dtype != torch.float32
            keys = make_keys(step, number)
            gradient = parameter.grad.contiguous()
            if rounded and parameter.is_cuda:
                from eagle3.train.kernels.adamw import fused_step

                fused_step(parameter, gradient, state, Coefficients.of(group, step), keys)
            else:
                plain_step(parameter, gradient, state, Coefficients.of(group, step), keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups and state; torch's own would turn moments into the parameters' type."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.clone().cpu() if name == "step" else value.to(parameter.device, copy=True)
                for name, value in values.items()
            }

    def _start(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU, so that no step waits for a GPU
        for name, (shape, dtype) in moment_layout(parameter.shape, self.moments).items():
            state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return state


def plain_step(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], by: Coefficients, keys: tuple[int, int]
) -> None:
    """One step of a parameter, in place: what the kernel computes, bit for bit.

    Args:
        weight, gradient: float32, of one shape and contiguous.
        state: the tensors of `moment_layout`, besides others.
        keys: from `make_keys`.
    """
    flat, flat_gradient = weight.detach().view(-1), gradient.view(-1)
    moments = {name: value.view(-1) for name, value in state.items() if name != "step"}
    for begin in range(0, flat.numel(), _PIECE):
        piece = slice(begin, begin + _PIECE)
        blocks = slice(begin // BLOCK, (begin + _PIECE) // BLOCK)
        parts = {name: value[blocks if name.endswith("scale") else piece] for name, value in moments.items()}
        slope = flat_gradient[piece]
        old = _read(parts)
        first = old[0] * by.beta1 + slope * by.rest1
        second = (old[1] * by.beta2 + slope * slope * by.rest2).clamp(max=_LARGEST)
        root = second.double().sqrt().float()  # in float32 a CPU's own may be off by a last bit
        flat[piece] = flat[piece] * by.decay - first / (root * by.correction + by.eps) * by.size
        _write(parts, first, second, root, begin, keys)


def _read(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both moments in float32, [N] each."""
    if "exp_avg_sq" in parts:
        return parts["exp_avg"].float(), parts["exp_avg_sq"].float()
    count = len(parts["exp_avg"])
    first, root = (
        from_float8(_in_blocks(parts[name].view(torch.uint8)).view(torch.float8_e4m3fn), parts[f"{name}_scale"])
        for name in ("exp_avg", "exp_avg_sq_root")
    )
    return first.view(-1)[:count], (root * root).view(-1)[:count]


def _write(
    parts: dict[str, Tensor], first: Tensor, second: Tensor, root: Tensor, begin: int, keys: tuple[int, int]
) -> None:
    if parts["exp_avg"].dtype == torch.float32:
        parts["exp_avg"].copy_(first)
        parts["exp_avg_sq"].copy_(second)
        return
    random = random_bits(begin, len(first), keys)
    if "exp_avg_sq" in parts:
        parts["exp_avg"].copy_(to_bfloat16(first, random[0]))
        parts["exp_avg_sq"].copy_(to_bfloat16(second, random[1]))
        return
    count = len(first)
    first, second, root, low, top = (_in_blocks(value) for value in (first, second, root, *random))
    for name, (value, scale) in {
        "exp_avg": to_float8(first, low),
        "exp_avg_sq_root": root_to_float8(second, root, top),
    }.items():
        parts[name].copy_(value.view(-1)[:count])
        parts[f"{name}_scale"].copy_(scale)


def _in_blocks(value: Tensor) -> Tensor:
    """[N] as [B, 256], filled up with zeros."""
    return pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)

"""FSDP2: trained weights, gradients and moments in shards (torch's `fully_shard`).

The drafter is one block, all of whose weights the step needs at once, so it is sharded as one: weights are gathered at
a window's first forward pass and freed after its last backward pass, which also leaves each process its share of the
averaged gradients. In between they are whole, which the fused step and the copies that it keeps rely on. The frozen
embedding is not sharded: it would be gathered with the rest, to no avail.

Accelerate launches and joins the processes; the sharding is done here, since Accelerate's own would keep the weights to
compute with, and exchange gradients, in bfloat16 where autocast is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3.config import OptimSection
from eagle3.draft.ttt import TTTLoss, TTTOutput
from eagle3.train.checkpoint import load_optimizer_tensors, optimizer_tensors
from eagle3.train.engines.base import AsTuple
from eagle3.train.engines.replicated import OfAccelerator
from eagle3.train.engines.sharded import bf16_autocast, on_main, refuse_whole_parameters
from eagle3.train.optim import clip_and_step, make_optimizer


class FullySharded(OfAccelerator):
    """See `eagle3.train.engines.base.Engine`."""

    name = "fsdp2"
    copies = True

    def prepare(self, module: TTTLoss, optim: OptimSection) -> None:
        refuse_whole_parameters(self.name, optim)
        self.module, self._kind = module.to(self.device), optim.kept
        for value in (*module.parameters(), *module.buffers()):
            dist.broadcast(value.data, 0)
        self._root = AsTuple(module, self.bf16)
        fully_shard(
            self._root,
            mesh=init_device_mesh(self.device.type, (self.num_processes,)),
            reshard_after_forward=False,
            ignored_params={value for value in module.parameters() if not value.requires_grad},
        )
        self.optimizer = make_optimizer(module.model, optim, fused=self.device.type == "cuda")

    def model(self, *args: Any) -> TTTOutput:
        return TTTOutput(*self._root(*args))

    def active(self) -> str:
        trained = [value for value in self.module.parameters() if value.requires_grad]
        sharded = all(isinstance(value, DTensor) for value in trained) and isinstance(self._root, FSDPModule)
        return self.name if sharded else f"{type(self._root).__name__} with weights that are not sharded"

    def autocast(self) -> AbstractContextManager[Any]:
        return bf16_autocast(self.device, self.bf16)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients add up whole and weights stay whole, as under DDP."""
        self._exchange(False)
        try:
            yield
        finally:
            self._exchange(True)

    def _exchange(self, wanted: bool) -> None:
        self._root.set_requires_gradient_sync(wanted)  # type: ignore[operator]
        self._root.set_reshard_after_backward(wanted)  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, rate: float, max_norm: float, check: Callable[[float], None]) -> float:
        return clip_and_step(self.module, self.optimizer, rate, max_norm, check)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._root.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            self._root.reshard()  # type: ignore[operator]

    def weights(self) -> dict[str, Tensor]:
        state = self.module.model.trainable_state()
        return on_main(self.accelerator, ((name, _whole(value)) for name, value in state.items()))

    def moments(self) -> dict[str, Tensor]:
        state = optimizer_tensors(self.optimizer, self.module.model)
        return on_main(self.accelerator, ((name, _whole(value)) for name, value in state.items()))

    def load_moments(self, tensors: Mapping[str, Tensor], updates: int, folder: Path) -> None:
        load_optimizer_tensors(self.optimizer, self.module.model, tensors, self._kind, updates, folder, _shard_like)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """This process's share of a moment that every process has whole."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value  # the count of steps
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )

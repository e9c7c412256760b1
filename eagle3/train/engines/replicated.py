"""One process, or data parallelism (DDP): every process holds everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from eagle3.config import OptimSection
from eagle3.draft.ttt import TTTLoss
from eagle3.train.checkpoint import load_optimizer_tensors, optimizer_tensors
from eagle3.train.optim import clip_and_step, make_optimizer


class OfAccelerator:
    """What every engine leaves to the accelerator; see `Ranks`.

    Args:
        bf16: see `Engine`; under DeepSpeed an accelerator's own precision is DeepSpeed's.
    """

    def __init__(self, accelerator: Accelerator, bf16: bool) -> None:
        self.accelerator, self.bf16 = accelerator, bf16
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def num_processes(self) -> int:
        return self.accelerator.num_processes

    @property
    def process_index(self) -> int:
        return self.accelerator.process_index

    def reduce(self, tensor: Tensor, reduction: str) -> Any:
        with self.waiting():
            return self.accelerator.reduce(tensor, reduction=reduction)


class Replicated(OfAccelerator):
    """See `eagle3.train.engines.base.Engine`."""

    copies = False

    def __init__(self, accelerator: Accelerator, bf16: bool) -> None:
        super().__init__(accelerator, bf16)
        self.name = "single" if accelerator.num_processes == 1 else "ddp"

    def prepare(self, module: TTTLoss, optim: OptimSection) -> None:
        optimizer = make_optimizer(module.model, optim, fused=self.device.type == "cuda")
        self.module, self._kind = module, optim.kept
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)

    def active(self) -> str:
        return "ddp" if isinstance(self.model, DistributedDataParallel) else "single"

    def autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast()

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def update(self, rate: float, max_norm: float, check: Callable[[float], None]) -> float:
        return clip_and_step(self.module, self.optimizer, rate, max_norm, check)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        return self.module.model.trainable_state() if self.accelerator.is_main_process else {}

    def moments(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.optimizer, self.module.model) if self.accelerator.is_main_process else {}

    def load_moments(self, tensors: Mapping[str, Tensor], updates: int, folder: Path) -> None:
        load_optimizer_tensors(self.optimizer, self.module.model, tensors, self._kind, updates, folder)

"""What the trainer asks of an engine: one that holds weights and moments whole on every process, or in shards.

Every engine exchanges gradients once a window and averages them over processes, so the loss is multiplied by their
number (`eagle3.train.window`). What an engine gives for a checkpoint, or takes from one, is whole: the same tensors
whichever engine and number of processes wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle3.config import OptimSection
from eagle3.draft.ttt import TTTLoss, TTTOutput


class Ranks(Protocol):
    """What a step needs of the processes; every `Engine` is one, and so is an `Accelerator`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Within, the drafter computes in the run's precision; its weights stay float32."""
        ...

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Within, backward passes add up gradients and do not complete their exchange."""
        ...

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch."""
        ...

    def reduce(self, tensor: Tensor, reduction: str) -> Any:
        """`tensor` over all processes, on each of them."""
        ...


class Engine(Ranks, Protocol):
    """One way to train on several processes.

    Attributes:
        name: of its file in configs/accelerate, without .yaml.
        bf16: whether the drafter computes in bfloat16, under autocast.
        waiting: entered while this process waits for the others' sums.
        copies: whether `weights` and `moments` give copies in host memory, not the tensors that training changes.
        module: the drafter with its loss. Its parameters may be shards, but within `whole`.
    """

    name: str
    bf16: bool
    waiting: Callable[[], AbstractContextManager[None]]
    copies: bool
    module: TTTLoss

    @property
    def model(self) -> Callable[..., TTTOutput]:
        """`module` as a step calls it, with the arguments of `TTTLoss.forward`."""
        ...

    def prepare(self, module: TTTLoss, optim: OptimSection) -> None:
        """Takes over the drafter, whole and with the weights to begin with, and makes its optimizer.

        Raises:
            ProblemsError: kinds `train.engine_moments`, `train.engine_optimizer`: the engine cannot keep such moments,
                or take such steps.
        """
        ...

    def active(self) -> str:
        """What really runs, read off the prepared objects: a `name`, or what they are instead."""
        ...

    def update(self, rate: float, max_norm: float, check: Callable[[float], None]) -> float:
        """Clips the gradients by their global norm, steps at this learning rate and clears them.

        Args:
            check: gets the norm before clipping and raises if it is not finite; then no weight has changed.

        Returns:
            That norm.
        """
        ...

    def clear(self) -> None:
        """Drops the gradients of a window without a term."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Within, `module` has whole parameters on every process, to read; enter it on all of them."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The trained weights, whole, on the main process; {} elsewhere. Call it on every process."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, whole, as `eagle3.train.checkpoint.optimizer_tensors` names it; see `weights`."""
        ...

    def load_moments(self, tensors: Mapping[str, Tensor], updates: int, folder: Path) -> None:
        """Puts back what `moments` gave; see `eagle3.train.checkpoint.load_optimizer_tensors`."""
        ...


class AsTuple(nn.Module):
    """The module that sharding wraps: outputs as a tuple, in which engines find the tensors that their hooks go on.

    Args:
        autocast: whether to compute in bfloat16; the parameters are float32 all the same.
    """

    def __init__(self, module: TTTLoss, autocast: bool) -> None:
        super().__init__()
        self.module, self._autocast = module, autocast

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        kind = self.module.draft_ids.device.type
        with torch.autocast(kind, torch.bfloat16) if self._autocast else nullcontext():
            output = self.compute(*args)
        return output.loss, output.loss_sums, output.correct, output.active, output.in_vocab

    def compute(self, *args: Any) -> TTTOutput:
        """The module's output."""
        output: TTTOutput = self.module(*args)
        return output

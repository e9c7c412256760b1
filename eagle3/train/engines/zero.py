"""DeepSpeed's ZeRO: gradients and moments in shards (stage 2), trained weights too (stage 3).

Accelerate launches and joins the processes; DeepSpeed is configured here, whole: float32 throughout (its bf16 mode
would turn the weights into bfloat16, and its own autocast stays off; the drafter's is inside the module), clipping by
the global norm, and the end of a window said by hand, since windows differ in length.

Stage 3 takes the drafter as one leaf: its weights are gathered around the whole forward pass and again for the backward
pass. The frozen embedding is kept out of what DeepSpeed sees: it would be gathered with the rest, to no avail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eagle3.config import OptimSection
from eagle3.draft.ttt import TTTLoss, TTTOutput
from eagle3.train.checkpoint import check_optimizer_tensors
from eagle3.train.engines.base import AsTuple
from eagle3.train.engines.replicated import OfAccelerator
from eagle3.train.engines.sharded import bf16_autocast, on_main, refuse_whole_parameters
from eagle3.train.optim import make_optimizer, set_learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(OfAccelerator):
    """See `eagle3.train.engines.base.Engine`.

    Args:
        stage: 2 or 3.
    """

    copies = True

    def __init__(self, accelerator: Accelerator, bf16: bool, stage: int) -> None:
        assert stage in (2, 3)
        super().__init__(accelerator, bf16)
        self.stage, self.name = stage, f"deepspeed_zero{stage}"

    def prepare(self, module: TTTLoss, optim: OptimSection) -> None:
        import deepspeed

        refuse_whole_parameters(self.name, optim)
        self.module = module.to(self.device)
        _hide_embedding(module)
        root = InOrder(module, self.bf16)
        if self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(root, [InOrder])
        optimizer = make_optimizer(module.model, optim, fused=self.device.type == "cuda")
        config = zero_config(self.stage, self.num_processes, optim.max_grad_norm)
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=root, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._start()

    def _start(self) -> None:
        """Makes AdamW's state of every shard, as AdamW would at its first step.

        DeepSpeed 0.19 links parameters to it at the first group's first step, when the next groups have none yet.
        """
        for shard in self._shards():
            self._base.state[shard] = {
                "step": torch.zeros((), device=self.device if self._base.defaults["fused"] else None),
                **{moment: torch.zeros_like(shard) for moment in _MOMENTS},
            }
        if self.stage == 2:
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def model(self, *args: Any) -> TTTOutput:
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        return TTTOutput(*self._engine(anchor, *args))

    def active(self) -> str:
        dtypes = {value.dtype for value in self.module.parameters()}
        if dtypes != {torch.float32}:
            return f"DeepSpeed with weights in {', '.join(map(str, dtypes))}"
        return f"deepspeed_zero{int(self._engine.zero_optimization_stage())}"

    def autocast(self) -> AbstractContextManager[Any]:
        return bf16_autocast(self.device, self.bf16)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """ZeRO exchanges each micro-batch's gradients at once; what is put off is the window's end."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def update(self, rate: float, max_norm: float, check: Callable[[float], None]) -> float:
        """`max_norm` is the one that the optimizer was made with."""
        set_learning_rate(self.optimizer, rate)
        self._engine.step()
        norm = float("inf") if self.optimizer.overflow else float(self._engine.get_global_grad_norm())
        check(norm)  # where it is not finite, DeepSpeed has left the weights alone
        return norm

    def clear(self) -> None:
        """Does nothing: without a term every gradient is zero, and what is added to the next window's is nothing."""

    def whole(self) -> AbstractContextManager[None]:
        if self.stage == 2:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(self.module.parameters()))
        return gathered

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return on_main(self.accelerator, ((name, safe_get_full_fp32_param(value)) for name, value in self._trained()))

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = {float(self._base.state[shard]["step"]) for shard in self._shards()}
        assert len(steps) == 1, f"shards have taken {steps} steps"
        if not (taken := steps.pop()):
            return {}
        tensors = (
            (f"{name}.{moment}", safe_get_full_optimizer_state(value, moment))
            for name, value in self._trained()
            for moment in _MOMENTS
        )
        found = on_main(self.accelerator, tensors)
        if found:
            found |= {f"{name}.step": torch.tensor(taken) for name, _ in self._trained()}
        return found

    def load_moments(self, tensors: Mapping[str, Tensor], updates: int, folder: Path) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors and not updates:
            return
        shapes = {name: self._shape(value) for name, value in self._trained()}
        check_optimizer_tensors(shapes, tensors, "float32", updates, folder)
        for shard in self._shards():
            self._base.state[shard]["step"].fill_(updates)
        for name, parameter in self._trained():
            for moment in _MOMENTS:
                safe_set_full_optimizer_state(parameter, tensors[f"{name}.{moment}"].to(self.device), moment)

    @property
    def _base(self) -> torch.optim.Optimizer:
        """torch's AdamW, which DeepSpeed gives flat shards."""
        base: torch.optim.Optimizer = self.optimizer.optimizer
        return base

    def _shards(self) -> list[Tensor]:
        """This process's flat float32 shards."""
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, value) for name, value in self.module.model.named_parameters() if value.requires_grad]

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.ds_shape if self.stage == 3 else parameter.shape  # type: ignore[attr-defined]


class InOrder(AsTuple):
    """Hands gradients out all at once, in one order whatever the batch; its first argument wants a gradient as well.

    ZeRO-2 puts them into buckets in the order in which autograd reaches the weights, and exchanges buckets as they are:
    a process whose batch is empty takes another path through autograd, and its neighbours' buckets would get its
    gradients of other weights. ZeRO-3 takes a leaf's backward pass as over once its inputs have their gradients, and at
    its begin where none wants one: it would exchange zeros.
    """

    def compute(self, *args: Any) -> TTTOutput:
        anchor, *others = args
        trained = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        _, *values = _Together.apply(anchor, *trained.values())
        output: TTTOutput = torch.func.functional_call(
            self.module, dict(zip(trained, values, strict=True)), tuple(others)
        )
        return output


class _Together(torch.autograd.Function):
    """The same tensors."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def zero_config(stage: int, processes: int, max_norm: float) -> dict[str, Any]:
    """DeepSpeed's whole config.

    Args:
        max_norm: of the gradients, above which they are scaled down.
    """
    return {
        "train_batch_size": processes,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": None,
    }


def _hide_embedding(module: TTTLoss) -> None:
    """Takes the frozen embedding out of the modules whose parameters DeepSpeed finds; it stays `embed_tokens`."""
    embedding = module.model._modules.pop("embed_tokens")
    object.__setattr__(module.model, "embed_tokens", embedding)

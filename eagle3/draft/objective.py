"""What a term costs: the loss of a row and its slope, in plain torch; `kernels.loss` has the same for a GPU.

p is the teacher, the softmax of the target's logits t on the draft vocab; q the softmax of the draft's logits z.

- `cross_entropy`: -sum p log q (arXiv 2503.01840). Slope q - p.
- `kl`: sum p log(p / q): less by p's own entropy, and the same slope.
- `reverse_kl`: sum q log(q / p) (for distillation: arXiv 2306.08543). Slope q (log(q / p) - loss).
- `lk_alpha`: -log a, where a = sum min(p, q) is the rate at which speculative sampling accepts (arXiv 2211.17192).
- `lk_lambda`: l KL + (1 - l) TV, where TV = 1 - a is the total variation and l = weight exp(-eta a), taken as constant.

Both LK losses are of arXiv 2602.23881. There a in l is a mean over a draft step's terms; here it is the term's own, so
that a term's loss does not depend on what else is in its batch. With B the tokens where q < p, the slope of a is
q (1 on B, else 0) - q q(B).

A teacher of few tokens (`keep_greatest`) has p = 0 elsewhere. Reverse KL would be infinite there, so it is taken within
the teacher's tokens S, of q' = q / q(S), and -log q(S) is added, as it is a part of forward KL, too.

Shapes: R rows, D draft vocab.
"""

from __future__ import annotations

import torch

from eagle3.draft.config import Objective

LEAST_ACCEPTANCE = 1e-30
"""Below it a counts as this, so that its logarithm is finite."""
_ROWS = 1024
"""Rows that `keep_greatest` looks at at once."""


def left_out(dtype: torch.dtype) -> float:
    """The logit of a token that the teacher leaves out: its chance is 0, and sums of 10^8 of it stay finite."""
    return max(-1e30, torch.finfo(dtype).min / 4)


def keep_greatest(teacher: torch.Tensor, count: int) -> torch.Tensor:
    """Leaves only each row's `count` greatest of the target's logits [R, D], in place.

    Where several are equal to the last of them, all of these stay.
    """
    if count < teacher.shape[1]:
        for rows in teacher.split(_ROWS):
            least = rows.topk(count, dim=-1).values[:, -1:]
            rows.masked_fill_(rows < least, left_out(rows.dtype))
    return teacher


def losses_and_slopes(
    logits: torch.Tensor, teacher: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [R] of each row and its slope [R, D] by the draft's logits, in at least float32.

    Args:
        logits: [R, D], the draft's.
        teacher: [R, D], the target's on the draft vocab.
        objective: which loss.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if objective.kind == "reverse_kl":
        return _reverse_kl(logits, teacher, dtype)
    chances = teacher.softmax(-1, dtype=dtype)
    logs = logits.log_softmax(-1, dtype=dtype)
    if objective.kind == "cross_entropy":
        return -(chances * logs).sum(-1), logs.exp_().sub_(chances)
    divergence = (chances * (teacher.log_softmax(-1, dtype=dtype) - logs)).sum(-1)
    drafted = logs.exp_()
    if objective.kind == "kl":
        return divergence, drafted.sub_(chances)
    overlap = torch.minimum(chances, drafted).sum(-1).clamp(min=LEAST_ACCEPTANCE)
    below = drafted.where(drafted < chances, 0)
    rise = below - drafted * below.sum(-1, keepdim=True)
    if objective.kind == "lk_alpha":
        return -overlap.log(), -rise / overlap[:, None]
    share = objective.weight * (-objective.eta * overlap).exp()
    slopes = share[:, None] * (drafted - chances) - (1 - share)[:, None] * rise
    return share * divergence + (1 - share) * (1 - overlap), slopes


def _reverse_kl(logits: torch.Tensor, teacher: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    taught = teacher > left_out(teacher.dtype) / 2
    within = logits.to(dtype).masked_fill(~taught, -torch.inf)
    mass = logits.logsumexp(-1) if logits.dtype == dtype else logits.to(dtype).logsumexp(-1)
    own_mass = within.logsumexp(-1)
    own = (within - own_mass[:, None]).exp_()
    gaps = (logits - own_mass[:, None] - teacher.log_softmax(-1, dtype=dtype)).masked_fill_(~taught, 0)
    divergence = (own * gaps).sum(-1)
    slopes = own * (gaps - divergence[:, None]) - own + (logits - mass[:, None]).exp()
    return divergence + mass - own_mass, slopes

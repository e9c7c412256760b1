"""How a draft model starts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, raise_problems

STANDARD_DEVIATION = 0.02
LAST_SLOT_NOISE = 0.1
LAYER_NAMES = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
"""A target's decoder layer, as `init_layer_from_target` takes it."""
_READS_BOTH = LAYER_NAMES[:3]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Matrices from a normal of deviation 0.02, norms at one; the same on every device for one seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0, STANDARD_DEVIATION, generator=generator))


@torch.no_grad()
def init_from_target(
    model: nn.Module,
    embed: torch.Tensor,
    norm_weight: torch.Tensor | None,
    lm_head: torch.Tensor | None,
    vocab: DraftVocab,
) -> None:
    """Takes over the target's embedding, final norm and the head's rows of the draft vocab.

    Args:
        model: a `DraftModel`.
        embed: [V, H].
        norm_weight: [H]; None leaves `norm` as it is.
        lm_head: [V, H]; None leaves `lm_head` as it is.
        vocab: the draft vocab.

    Raises:
        ProblemsError: kind `draft.target_shape`, for tensors that do not fit.
    """
    head = None if lm_head is None else lm_head[vocab.ids.to(lm_head.device)]
    sources = {"embed_tokens.weight": embed, "norm.weight": norm_weight, "lm_head.weight": head}
    given = {name: source for name, source in sources.items() if source is not None}
    parameters = dict(model.named_parameters())
    raise_problems(
        Problem(
            name,
            "draft.target_shape",
            f"the target gives {list(source.shape)}, the drafter has {list(parameters[name].shape)}",
            "build the draft config from this target, and the draft vocab with this draft_vocab_size",
        )
        for name, source in given.items()
        if source.shape != parameters[name].shape
    )
    for name, source in given.items():
        parameters[name].copy_(source)


@torch.no_grad()
def start_fc_at_last_slot(fc: nn.Linear) -> None:
    """Makes `fc` [H, A * H] pass the deepest captured layer on, plus a tenth of the weights it has.

    That layer is the nearest to what the head reads, so a head started from the target's makes sense of it from the
    first step on. On SmolLM2-135M with 256 answers it gives in 4 epochs what a random `fc` needs 8 for
    (`docs/benchmarks.md`).
    """
    width = fc.out_features
    fc.weight.mul_(LAST_SLOT_NOISE)
    fc.weight[:, -width:] += torch.eye(width, dtype=fc.weight.dtype, device=fc.weight.device)


@torch.no_grad()
def init_layer_from_target(model: nn.Module, layer: Mapping[str, torch.Tensor]) -> None:
    """Takes over a decoder layer of the target.

    The drafter's q, k and v read the normed embedding beside the normed state: the target's go to the state's half,
    whose `hidden_norm` gets the target's input norm; the embedding's half and `input_layernorm` stay as they are. So a
    state is attended to and transformed as in the target, but for what the embedding adds.

    Args:
        model: a `DraftModel`, [.., 2H] in q, k and v.
        layer: by `LAYER_NAMES`, [.., H] in q, k and v; of the drafter's shape otherwise.
    """
    parameters: dict[str, torch.Tensor] = dict(model.get_submodule("midlayer").named_parameters())
    for name in LAYER_NAMES:
        source = layer[name]
        target = parameters["hidden_norm.weight" if name == "input_layernorm.weight" else name]
        if name in _READS_BOTH:
            target = target[:, source.shape[1] :]
        assert target.shape == source.shape, (name, target.shape, source.shape)
        target.copy_(source)

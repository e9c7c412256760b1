"""Names, shapes and types of an exported draft checkpoint, strict in both directions.

The names are those that SGLang's `LlamaForCausalLMEagle3.load_weights` (`sglang/srt/models/llama_eagle3.py`) maps
onto its parameters; it skips a name that it does not know and leaves a parameter that no name reaches
uninitialised, both without a word. So here nothing may be missing, extra, of another shape or type, or not finite.

Shapes: D draft vocab, H hidden, V target vocab.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab, check_tables
from eagle3.errors import Problem, raise_problems

EMBEDDING = "embed_tokens.weight"
TABLES = ("d2t", "t2d")
Shapes = Mapping[str, tuple[int, ...]]


def trained_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trained tensor."""
    with torch.device("meta"):
        model = DraftModel(config)
    return {name: tuple(value.shape) for name, value in model.trainable_state().items()}


def check_tensors(tensors: Mapping[str, Tensor], shapes: Shapes, where: str) -> list[Problem]:
    """Missing, extra, mis-shaped, non-floating and non-finite tensors; kinds `tensor.*`."""
    again = "use another checkpoint, or make this file again"
    problems = [
        Problem(where, "tensor.missing", f"no tensor {name}, expected shape {list(shapes[name])}", again)
        for name in sorted(shapes.keys() - tensors.keys())
    ]
    for name in sorted(tensors):
        tensor, shape = tensors[name], shapes.get(name)
        if shape is None:
            message = f"unknown tensor {name} {list(tensor.shape)}, which a server would skip"
            problems.append(Problem(where, "tensor.extra", message, again))
        elif tuple(tensor.shape) != shape:
            message = f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"
            problems.append(Problem(where, "tensor.shape", message, again))
        elif not tensor.is_floating_point():
            message = f"{name} is {tensor.dtype}, expected a floating-point type"
            problems.append(Problem(where, "tensor.dtype", message, again))
        elif bad := int((~torch.isfinite(tensor)).sum()):
            message = f"{name} holds {bad} NaN or infinite values as {tensor.dtype}"
            problems.append(Problem(where, "tensor.not_finite", message, "use an earlier checkpoint or a wider type"))
    return problems


def to_exported(
    state: Mapping[str, Tensor],
    config: DraftConfig,
    vocab: DraftVocab,
    dtype: torch.dtype,
    embedding: Tensor | None,
    where: str,
) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`: weights in `dtype`, d2t int64 [D], t2d bool [V].

    Args:
        state: the trained tensors (`trained_shapes`).
        config: the drafter's shape.
        vocab: the draft vocab.
        dtype: of the written weights.
        embedding: [V, H] the target's, written bit for bit; None leaves it out.
        where: what `state` was read from, for messages.

    Raises:
        ProblemsError: everything that is missing, extra, mis-shaped or not finite after the cast.
    """
    exported = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    shapes = trained_shapes(config)
    if embedding is not None:
        exported[EMBEDDING] = embedding
        shapes[EMBEDDING] = (config.vocab_size, config.hidden_size)
    raise_problems(check_tensors(exported, shapes, where))
    return exported | {"d2t": vocab.d2t, "t2d": vocab.t2d}


def from_exported(
    tensors: Mapping[str, Tensor], config: DraftConfig, where: str
) -> tuple[dict[str, Tensor], DraftVocab]:
    """The trained tensors and the draft vocab of an exported checkpoint; its embedding, if any, is the target's.

    Raises:
        ProblemsError: everything that is missing, extra, mis-shaped, not finite, or wrong in the tables.
    """
    trained = trained_shapes(config)
    embedding = {EMBEDDING: (config.vocab_size, config.hidden_size)} if EMBEDDING in tensors else {}
    weights = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    problems = check_tensors(weights, trained | embedding, where)
    absent = [name for name in TABLES if name not in tensors]
    fix = "export again: without it a server takes draft id i for target id i"
    problems += [Problem(where, "tensor.missing", f"no tensor {name}", fix) for name in absent]
    if not absent:
        problems += check_tables(tensors["d2t"], tensors["t2d"], config.vocab_size, where)
    raise_problems(problems)
    return {name: weights[name] for name in trained}, DraftVocab.from_tables(tensors["d2t"], tensors["t2d"], where)

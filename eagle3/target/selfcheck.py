"""The proof, before anything is written, that the states about to be stored are what their contract says.

A few samples go through the target once. The captured layers must equal Transformers' own `hidden_states` of that
same pass bit for bit, and the logits rebuilt from the states *as stored* (rounded to the store's type, through the
recorded norm and head, by the code that training uses) must be the model's.

What it does not prove: that the checkpoint is the one that will be served, or that the layers are those that a
drafter wants.

Legend: T tokens, A aux layers, H target hidden, V target vocab, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle3.data.target_argmax import make_target_head
from eagle3.draft.loss import TargetHead
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.target.engines.streamed import StreamedEngine
from eagle3.target.engines.transformers import Reference, TransformersEngine
from eagle3.target.streaming.comparison import compare_layers

_SAMPLES = 4
_TOKENS = 256
# Relative error of the logits: exact types leave only the order of summation; a 16-bit type rounds states to one
# part in 256. A wrong head or a missing norm is off by tens of percent.
_EXACT_ERROR = 1e-4
_ROUNDED_ERROR = 2e-2
_FLIPS = 0.1
_HEAD_TOKENS = 16
_DAMAGED = "nothing was written; download the checkpoint again (a weight is damaged), or set a wider target.dtype"
_FIX = "nothing was written; report this target's config, its capture needs its own TargetSpec"


def self_check(
    engine: TransformersEngine,
    ids: Sequence[str],
    batch: Sequence[Sequence[int]],
    head: TargetHead,
    store_dtype: torch.dtype,
) -> None:
    """Runs a few samples (cut to their first tokens) and compares.

    Args:
        engine: what will capture.
        ids: names of all samples, for errors.
        batch: token ids of all samples.
        head: the recorded recipe from last hidden states to logits.
        store_dtype: type that states are stored in.

    Raises:
        ProblemsError: kind `selfcheck.aux` or `selfcheck.logits`, for each sample that differs.
    """
    chosen = pick_samples([len(tokens) for tokens in batch])
    reference = engine.reference([batch[index][:_TOKENS] for index in chosen])
    problems = []
    for place, index in enumerate(chosen):
        problems += _check_aux(reference, place, engine, ids[index])
        problems += _check_logits(reference, place, head, store_dtype, ids[index])
    raise_problems(problems, "the self-check failed")


def self_check_streamed(
    engine: StreamedEngine, ids: Sequence[str], batch: Sequence[Sequence[int]], store_dtype: torch.dtype
) -> None:
    """Runs a few samples (cut to their first tokens) through the first layers, up to the first one with experts, as the
    walk does and by Transformers' own code from the same weights, and compares; then the head's recipe with the model's
    own norm and head.

    A mixture's choice of experts may flip for a token between two ways of rounding, so in a 16-bit type a tenth of the
    tokens may differ; wrong weights, masks or positions change nearly all.

    Args:
        engine: what will capture.
        ids, batch: names and token ids of all samples.
        store_dtype: type that states are stored in.

    Raises:
        ProblemsError: kind `selfcheck.streamed` or `selfcheck.logits`.
    """
    chosen = pick_samples([len(tokens) for tokens in batch])
    allowed = _allowed(engine.skeleton.dtype)
    flips = 0.0 if allowed == _EXACT_ERROR else _FLIPS
    problems, own = [], None
    for number, outputs in compare_layers(engine.layer_walk, [batch[index][:_TOKENS] for index in chosen]):
        for index, (fast, plain) in zip(chosen, outputs, strict=True):
            errors = (fast.float() - plain.float()).norm(dim=-1)
            wrong = float((~(errors <= allowed * plain.float().norm(dim=-1))).float().mean())
            if not torch.isfinite(plain).all():
                message = f"layer {number} of the target gives NaN or infinity, by Transformers' own code too"
                raise problem_error(ids[index], "selfcheck.non_finite", message, _DAMAGED)
            if wrong > flips:
                message = (
                    f"layer {number}: {wrong:.0%} of its tokens differ from Transformers' own by over {allowed:.2%}"
                )
                problems.append(Problem(ids[index], "selfcheck.streamed", message, _FIX))
        own = outputs[0][1][-_HEAD_TOKENS:]
    assert own is not None
    if not problems:
        problems += _check_head(engine, own, store_dtype, ids[chosen[0]])
    raise_problems(problems, "the self-check failed")


def _check_head(engine: StreamedEngine, states: torch.Tensor, store_dtype: torch.dtype, name: str) -> list[Problem]:
    """Logits by the recorded recipe against the model's own norm and head, for a few pre-norm states [n, H]."""
    tensors, kind = engine.head_tensors(), engine.last_hidden_states
    assert kind is not None
    head = make_target_head(tensors, engine.skeleton.files.text_config, kind)
    last = engine.layer_walk.normed(states) if kind == "post_norm" else states
    rebuilt = head.logits(last.cpu().to(store_dtype))
    norm = engine.skeleton.norm
    own = type(norm).forward(norm, states).cpu().float() @ head.lm_head.float().T
    error, allowed = relative_error(rebuilt, own), _allowed(store_dtype, engine.skeleton.dtype)
    if error <= allowed:
        return []
    found = f"logits from the stored {kind} states differ from the model's by {error:.2%}"
    return [Problem(name, "selfcheck.logits", f"{found}, allowed are {allowed:.2%}", _FIX)]


def pick_samples(lengths: Sequence[int], most: int = _SAMPLES) -> list[int]:
    """A few indices (at most `most`) from the shortest to the longest, so that the batch they make is padded."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    count = min(most, len(order))
    return [order[round(step * (len(order) - 1) / max(count - 1, 1))] for step in range(count)]


def _check_aux(reference: Reference, place: int, engine: TransformersEngine, name: str) -> list[Problem]:
    wiring = engine.wiring
    expected = [states[place] for states in reference.hidden_states]
    slots = reference.captures[place].aux_hidden_states.chunk(wiring.num_aux, dim=-1)
    problems = []
    for index, boundary, slot in zip(wiring.output_indices, wiring.boundaries, slots, strict=True):
        if boundary < wiring.num_hidden_layers:
            good = torch.equal(slot, expected[boundary])
        else:
            # Transformers' last entry is after the final norm, which is applied here to other rows at a time.
            error = relative_error(engine.normed(slot), expected[boundary])
            good = error <= _allowed(slot.dtype)
        if not good:
            equal = [other for other, states in enumerate(expected) if torch.equal(slot, states)]
            holds = f"hidden_states[{equal[0]}]" if equal else "none of the model's hidden states"
            message = f"the slot of output index {index} holds {holds}, expected hidden_states[{boundary}]"
            problems.append(Problem(name, "selfcheck.aux", message, _FIX))
    return problems


def _check_logits(
    reference: Reference, place: int, head: TargetHead, store_dtype: torch.dtype, name: str
) -> list[Problem]:
    model_logits = reference.logits[place]
    stored = reference.captures[place].last_hidden_states.to(store_dtype)
    rebuilt = head.logits(stored.to(head.lm_head.device)).cpu()
    error = relative_error(rebuilt, model_logits) if rebuilt.shape == model_logits.shape else float("inf")
    allowed = _allowed(store_dtype, head.lm_head.dtype)
    if error <= allowed:
        return []
    found = f"logits from the stored {head.kind} states differ from the model's by {error:.2%}"
    return [Problem(name, "selfcheck.logits", f"{found}, allowed are {allowed:.2%}", _FIX)]


def _allowed(*dtypes: torch.dtype) -> float:
    return _EXACT_ERROR if all(dtype == torch.float32 for dtype in dtypes) else _ROUNDED_ERROR


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of `expected`; NaN if anything is not finite."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm())

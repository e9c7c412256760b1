"""The proof, before anything is written, that a server's states are what the store's contract will say.

A few samples are asked for together with the server's own log-probabilities of their tokens. Those must follow from the
last hidden states, as they will be stored, through the head that is stored with them: that finds another norm, shifted
rows, other samples and another head, without the target's weights. The values must carry the type that `target.dtype`
says. Where the target itself fits in memory, each slot is compared with all of its layers, as `eagle3 wiring probe`
does.

What it does not prove, without the target's weights: that the aux states are those of the layers that the server names.

Legend: T tokens of a sample, A aux layers, H target hidden, N decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from eagle3.data.store_layout import StoreLayout
from eagle3.draft.loss import TargetHead
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.target.capture import Capture
from eagle3.target.engines.sglang import SglangEngine
from eagle3.target.engines.sglang_client import Answer
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Measured, allowed_error, diagnose
from eagle3.wiring.fingerprint import coarsest_type, measure
from eagle3.wiring.layers import EMBEDDING, LayerWiring
from eagle3.wiring.probe_report import SENTENCES, ProbeReport

_TOKENS = 256
# Of the log-probabilities, relative to how much they vary. A wrong row, norm or head is off by 100% and more.
_EXACT_ERROR, _ROUNDED_ERROR = 1e-3, 0.1
_WEIGHTS_FIX = "serve the weights that target.path holds, or give in target.path those that are served"


def check_served(
    engine: SglangEngine,
    contract: WiringContract,
    dtype: str,
    head: TargetHead,
    samples: Mapping[str, Sequence[int]],
    start: str,
    local: TransformersEngine | None,
) -> None:
    """Asks for these samples (cut to their first tokens) and compares.

    Args:
        engine: that will capture.
        contract: of the store.
        dtype: that the target is said to compute in.
        head: as it will be recorded.
        samples: token ids of a few samples (`pick_samples`), by name.
        start: how to start a server that is right, for errors.
        local: the target itself in this process, if it is at hand.

    Raises:
        ProblemsError: kinds `server.dtype`, `server.logits` and `probe.*`, everything that is found; and as
            `SglangEngine.capture`.
    """
    batch = [tokens[:_TOKENS] for tokens in samples.values()]
    vocab_size = contract.vocab_size
    answers = [
        engine.client.hidden_states(tokens, vocab_size, return_logprob=True, logprob_start_len=0) for tokens in batch
    ]
    captures = [engine.split(answer, tokens, vocab_size) for answer, tokens in zip(answers, batch, strict=True)]
    problems = [*_check_dtype(engine.client.url, captures, dtype)]
    last = [capture.last_hidden_states.to(StoreLayout(contract).value_dtype) for capture in captures]
    problems += _check_logits(engine.client.url, batch, answers, last, head)
    if local is not None:
        allowed = allowed_error(dtype, dtype)
        states = target_states(local, batch)
        measured = [_measured(*item, contract.wiring, allowed) for item in zip(samples, captures, states, strict=True)]
        verdicts = diagnose(measured, allowed)
        fixes = {**dict.fromkeys(SENTENCES, start), **dict.fromkeys(("other_weights", "other_target"), _WEIGHTS_FIX)}
        problems += ProbeReport(engine.client.url, verdicts, contract.num_hidden_layers, fixes).problems
    raise_problems(problems, f"the states of {engine.client.url} are not those of this target")


def target_states(local: TransformersEngine, batch: Sequence[Sequence[int]]) -> list[dict[Boundary, torch.Tensor]]:
    """Every boundary, and the post-norm last hidden states, of each sample: [T, H]."""
    wiring = LayerWiring(tuple(range(EMBEDDING, local.wiring.num_hidden_layers)), local.wiring.num_hidden_layers)
    captures = TransformersEngine(local.model, local.spec, wiring, "post_norm").capture(batch)
    return [
        {
            **dict(zip(wiring.boundaries, capture.aux_hidden_states.chunk(wiring.num_aux, dim=-1), strict=True)),
            POST_NORM: capture.last_hidden_states,
        }
        for capture in captures
    ]


def _check_dtype(url: str, captures: Sequence[Capture], expected: str) -> Iterator[Problem]:
    values = torch.cat([capture.aux_hidden_states.flatten() for capture in captures])
    found = coarsest_type(values)
    if found not in (expected, "float8_e4m3fn"):  # round numbers fit in anything
        message = f"its states are {found} values, target.dtype is {expected}"
        yield Problem(url, "server.dtype", message, f"set target.dtype={found}, or serve in {expected}")


def _check_logits(
    url: str,
    batch: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    last: Sequence[torch.Tensor],
    head: TargetHead,
) -> Iterator[Problem]:
    """The server's log-probability of each token but the first, against the one from the row before it."""
    theirs, mine = [], []
    for tokens, answer, rows in zip(batch, answers, last, strict=True):
        entries = answer.meta_info.get("input_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise problem_error(url, "server.logits", "gives no log-probabilities of a prompt's tokens", "see its log")
        theirs += [float(entry[0]) for entry in entries[1:]]
        following = torch.tensor(tokens[1:])[:, None]
        mine += head.logits(rows[:-1]).float().log_softmax(-1).gather(1, following)[:, 0].tolist()
    expected, found = torch.tensor(theirs), torch.tensor(mine)
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    allowed = _EXACT_ERROR if last[0].dtype == head.lm_head.dtype == torch.float32 else _ROUNDED_ERROR
    if not error <= allowed:
        message = (
            f"its log-probabilities differ by {error:.1%} from those of its last hidden states through target.path's "
            f"head, allowed are {allowed:.1%}: it serves other weights, or these are not post-norm states of each token"
        )
        yield Problem(url, "server.logits", message, _WEIGHTS_FIX)


def _measured(
    name: str, capture: Capture, states: Mapping[Boundary, torch.Tensor], wiring: LayerWiring, allowed: float
) -> list[Measured]:
    slots = capture.aux_hidden_states.chunk(wiring.num_aux, dim=-1)
    pairs: list[tuple[str, Boundary, torch.Tensor]] = [
        (f"slot {slot}", boundary, rows)
        for slot, (boundary, rows) in enumerate(zip(wiring.boundaries, slots, strict=True))
    ]
    pairs.append(("last hidden states", POST_NORM, capture.last_hidden_states))
    return [measure(slot, boundary, rows, states, allowed=allowed, sample=name) for slot, boundary, rows in pairs]

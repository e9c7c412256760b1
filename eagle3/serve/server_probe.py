"""`eagle3 wiring probe --server`: what a running SGLang feeds its drafter, against a dataset's fingerprint.

One request with the fingerprint's token ids, one generated token. With an EAGLE-3 drafter loaded and
`--enable-return-hidden-states`, SGLang answers with the very states that the drafter reads.
Source: `sglang/srt/managers/tokenizer_manager.py`, `sglang/srt/layers/logits_processor.py`, 0.5.8 to 0.5.23.

Legend: T tokens, A aux layers, C channels, H target hidden.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import torch

from eagle3.errors import ProblemsError, problem_error
from eagle3.target.engines.sglang_client import FIRST_WITH_OWN_ROWS, Answer, SglangClient, mixes_up_rows, rows_missing
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Measured, allowed_error, diagnose
from eagle3.wiring.engines import ids_to_write
from eagle3.wiring.fingerprint import measure
from eagle3.wiring.fingerprint_file import Fingerprint, load_fingerprint
from eagle3.wiring.layers import to_boundary
from eagle3.wiring.probe_report import ProbeReport

_SERVED = "serve the target that the dataset was extracted from, with the same weights"

_IDLE = f"before {FIRST_WITH_OWN_ROWS} it may answer with another request's states: probe it while it is idle"


def probe_server(
    folder: Path,
    url: str,
    api_key: str | None = None,
    timeout: float = 120.0,
    transport: httpx.BaseTransport | None = None,
) -> ProbeReport:
    """Says what each aux slot of a running SGLang holds.

    Args:
        folder: a hidden-state store (its manifest is enough), a run or an exported checkpoint, with a fingerprint.
        url: of the server, e.g. `http://localhost:30000`.
        api_key: sent as a bearer token.
        timeout: seconds to wait for an answer.
        transport: instead of the network.

    Raises:
        ProblemsError: kinds `server.*`: it is not there, not SGLang, returns no states, or not those of every token.
    """
    fingerprint, contract = load_fingerprint(folder)
    with SglangClient(url, api_key, timeout=timeout, transport=transport) as client:
        served = str(client.model_info()["model_path"])
        version = _version(client)
        answer = client.hidden_states(fingerprint.token_ids, contract.vocab_size)
    states = _checked(client.url, answer, len(fingerprint.token_ids), contract)
    allowed = allowed_error(contract.dtype, "bfloat16")
    return ProbeReport(
        where=client.url,
        verdicts=diagnose([_measured(states, fingerprint, contract, allowed)], allowed),
        num_hidden_layers=contract.num_hidden_layers,
        fixes=fixes(contract, version),
        notes=[f"SGLang {version or 'of an unknown version'} serves {served}", *[_IDLE] * mixes_up_rows(version)],
        facts={"engine": "sglang", "engine_version": version, "served": served, "fingerprint": fingerprint.digest},
    )


def _version(client: SglangClient) -> str | None:
    try:
        version = client.server_info().get("version")
    except ProblemsError:
        return None
    return version if isinstance(version, str) else None


def _checked(url: str, answer: Answer, tokens: int, contract: WiringContract) -> torch.Tensor:
    """The aux states [T, A * H] of the fingerprint's tokens."""
    states = answer.states
    if len(states) != tokens:
        raise rows_missing(url, answer, tokens)
    hidden, slots = contract.hidden_size, len(contract.output_indices)
    if states.shape[1] == hidden * slots:
        return states
    if states.shape[1] == hidden:
        message = "returned one state a token, its last hidden states: it captures no layers for a drafter"
        fix = "start it with --speculative-algorithm EAGLE3 and the draft checkpoint"
        raise problem_error(url, "server.no_drafter", message, fix)
    message = f"returned {states.shape[1]} values a token, the drafter was trained on {slots} layers of {hidden}"
    raise problem_error(url, "server.width", message, "serve the drafter with the target that it was trained for")


def _measured(
    states: torch.Tensor, fingerprint: Fingerprint, contract: WiringContract, allowed: float
) -> list[Measured]:
    """Each slot of the server [T, C] against every state in the fingerprint [P, C]."""
    reference: dict[Boundary, torch.Tensor] = {
        to_boundary(index): torch.tensor(rows) for index, rows in fingerprint.states.items()
    }
    last = POST_NORM if contract.last_hidden_states == "post_norm" else contract.num_hidden_layers
    reference[last] = torch.tensor(fingerprint.last)
    slots = states.split(contract.hidden_size, dim=-1)
    return [
        measure(
            f"slot {slot}",
            boundary,
            found[:, list(fingerprint.channels)],
            reference,
            allowed=allowed,
            sample=fingerprint.sample,
            reference_rows=fingerprint.positions,
        )
        for slot, (boundary, found) in enumerate(zip(contract.wiring.boundaries, slots, strict=True))
    ]


def fixes(contract: WiringContract, version: str | None) -> dict[str, str]:
    """What to do, by cause; for wrong layers it names the ids that are right for this version (None: the newest)."""
    try:
        right = ids_to_write(contract.wiring, "sglang", version, contract.target_family)
        layers = f"{list(right.ids)} in {right.key} is right for SGLang {right.version}: export again for that version"
    except ProblemsError as error:
        layers = f"find other ids or another version of SGLang: {error.problems[0].message}"
    return {
        **dict.fromkeys(("one_early", "one_late", "embedding", "other_layer", "permuted", "other_states"), layers),
        **dict.fromkeys(("post_norm", "pre_norm"), layers),
        **dict.fromkeys(("misaligned", "rows", "padding"), "report this with the server's version and its arguments"),
        "precision": "serve the target in the precision that it was extracted in",
        **dict.fromkeys(("other_weights", "other_target"), _SERVED),
    }

"""`eagle3 wiring probe --server`: what a running SGLang feeds its drafter, against a dataset's fingerprint.

One request with the fingerprint's token ids, one generated token. With an EAGLE-3 drafter loaded and
`--enable-return-hidden-states`, SGLang answers with the very states that the drafter reads.
Source: `sglang/srt/managers/tokenizer_manager.py`, `sglang/srt/layers/logits_processor.py`, 0.5.8 to 0.5.23.

Legend: T tokens, A aux layers, C channels, H target hidden.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import httpx
import torch

from eagle3.errors import Eagle3Error, ProblemsError, problem_error
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Measured, allowed_error, diagnose
from eagle3.wiring.engines import ids_to_write
from eagle3.wiring.fingerprint import measure
from eagle3.wiring.fingerprint_file import Fingerprint, load_fingerprint
from eagle3.wiring.layers import to_boundary
from eagle3.wiring.probe_report import ProbeReport

_SERVED = "serve the target that the dataset was extracted from, with the same weights"
_START = "start the server, wait until it is ready, and check the address"
_ENABLE = "start it with --enable-return-hidden-states (for this check; it costs a server memory and speed)"


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
    address = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection = httpx.Client(base_url=address, headers=headers, timeout=timeout, transport=transport)
    except httpx.InvalidURL as error:
        raise problem_error(address, "server.down", f"is no address: {error}", _START) from None
    with connection as client:
        served = _model_info(client, address)
        version = _version(client)
        states = _states(client, address, fingerprint, contract)
    allowed = allowed_error(contract.dtype, "bfloat16")
    return ProbeReport(
        where=address,
        verdicts=diagnose([_measured(states, fingerprint, contract, allowed)], allowed),
        num_hidden_layers=contract.num_hidden_layers,
        fixes=fixes(contract, version),
        notes=[f"SGLang {version or 'of an unknown version'} serves {served}"],
        facts={"engine": "sglang", "engine_version": version, "served": served, "fingerprint": fingerprint.digest},
    )


def _model_info(client: httpx.Client, url: str) -> str:
    """What the server serves; every SGLang since 0.5.8 says so at `/model_info`."""
    try:
        answer = client.get("/model_info")
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise problem_error(url, "server.down", f"cannot be reached: {error}", _START) from None
    except httpx.TransportError as error:
        raise _silent(url, error) from None
    if answer.status_code in (401, 403):
        raise problem_error(url, "server.refused", "wants an API key", "give it with --api-key") from None
    info = _json(answer)
    if answer.status_code != 200 or "model_path" not in info:
        message = f"is not an SGLang server: /model_info answers {answer.status_code}"
        raise problem_error(url, "server.not_sglang", message, "give the address of SGLang's HTTP server")
    return str(info["model_path"])


def _version(client: httpx.Client) -> str | None:
    try:
        version = _json(client.get("/server_info")).get("version")
    except httpx.TransportError:
        return None
    return version if isinstance(version, str) else None


def _states(client: httpx.Client, url: str, fingerprint: Fingerprint, contract: WiringContract) -> torch.Tensor:
    """The aux states [T, A * H] of the fingerprint's tokens."""
    request = {
        "input_ids": list(fingerprint.token_ids),
        # SGLang checks the ids of a bias, not those of a prompt: an id beyond its vocabulary would end the server.
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 0,
            "logit_bias": {str(contract.vocab_size - 1): 0.0},
        },
        "return_hidden_states": True,
        # A prefix cache of its own: states of cached tokens are not returned.
        "extra_key": f"eagle3-probe-{uuid.uuid4()}",
    }
    try:
        answer = client.post("/generate", json=request)
    except httpx.TransportError as error:
        raise _silent(url, error) from None
    body = _json(answer)
    if answer.status_code != 200:
        raise _refusal(url, answer, body, contract)
    return _checked(url, body.get("meta_info"), len(fingerprint.token_ids), contract)


def _checked(url: str, meta: Any, tokens: int, contract: WiringContract) -> torch.Tensor:
    returned = meta.get("hidden_states") if isinstance(meta, dict) else None
    if not returned:
        raise problem_error(url, "server.no_states", "answers without hidden states", _ENABLE)
    try:
        states = torch.tensor(returned[0], dtype=torch.float32)
    except (TypeError, ValueError) as error:
        message = f"answers with hidden states of another form: {error}"
        raise problem_error(url, "server.no_states", message, "report the server's version") from None
    states = states.reshape(-1, states.shape[-1])
    if len(states) != tokens:
        cached = meta.get("cached_tokens", "?")
        message = f"returned states of {len(states)} of {tokens} tokens; {cached} came from its prefix cache"
        fix = "start it with --disable-radix-cache, or with --chunked-prefill-size above the number of tokens"
        raise problem_error(url, "server.prefix_cache", message, fix)
    hidden, slots = contract.hidden_size, len(contract.output_indices)
    if states.shape[1] == hidden * slots:
        return states
    if states.shape[1] == hidden:
        message = "returned one state a token, its last hidden states: it captures no layers for a drafter"
        fix = "start it with --speculative-algorithm EAGLE3 and the draft checkpoint"
        raise problem_error(url, "server.no_drafter", message, fix)
    message = f"returned {states.shape[1]} values a token, the drafter was trained on {slots} layers of {hidden}"
    raise problem_error(url, "server.width", message, "serve the drafter with the target that it was trained for")


def _refusal(url: str, answer: httpx.Response, body: dict[str, Any], contract: WiringContract) -> Eagle3Error:
    error = body.get("error", body)
    said = str(error.get("message", error) if isinstance(error, dict) else error) or answer.text[:200]
    if "hidden" in said and ("configured" in said or "mode" in said):
        return problem_error(url, "server.hidden_states_off", "does not return hidden states", _ENABLE)
    if "logit_bias" in said:
        message = f"serves another vocabulary: the dataset's has {contract.vocab_size} tokens; it said: {said}"
        return problem_error(url, "server.vocabulary", message, _SERVED)
    message = f"refused the request ({answer.status_code}): {said}"
    return problem_error(url, "server.refused", message, "see the server's log")


def _silent(url: str, error: httpx.TransportError) -> Eagle3Error:
    message = f"gave no answer: {error or type(error).__name__}"
    return problem_error(url, "server.no_answer", message, "see the server's log: it may have ended, or be overloaded")


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


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

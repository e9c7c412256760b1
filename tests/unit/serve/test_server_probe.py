"""The probe of a server, against one that answers as SGLang does (the real one is in tests/serving)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eagle3.errors import Problem, ProblemsError
from eagle3.serve.server_probe import fixes, probe_server
from eagle3.target.extract import run_extract
from eagle3.target.probe import FIXES
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.diagnosis import POST_NORM
from eagle3.wiring.fingerprint_file import Fingerprint, load_fingerprint
from eagle3.wiring.probe_report import SENTENCES, ProbeReport
from tests.unit.target.cases import extract_config, write_conversations
from tests.unit.wiring.probe_cases import Target

URL = "http://server:30000"
BOUNDARIES = (2, 4, 6)


class FakeSglang:
    """Serves a tiny Llama; `slots` are the boundaries that it captures."""

    def __init__(self, target: Target, slots: Sequence[int] = BOUNDARIES) -> None:
        self.target = target
        self.slots = slots
        self.vocab = 512
        self.version = "0.5.23"
        self.hidden_states_enabled = True
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
        self.requests: list[dict[str, Any]] = []
        self.cached: dict[str, list[int]] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"model_path": "tiny-llama"})
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"version": self.version})
        assert request.url.path == "/generate"
        body = json.loads(request.content)
        self.requests.append(body)
        if max(map(int, body["sampling_params"]["logit_bias"])) >= self.vocab:
            return self.error(f"logit_bias must has keys in [0, {self.vocab - 1}], got 511.")
        if not self.hidden_states_enabled:
            return self.error("The server is not configured to return the hidden states. Please set ...")
        [states] = self.target.states([body["input_ids"]])
        rows = self.change(torch.cat([states[boundary] for boundary in self.slots], dim=-1))
        cached = self.prefix(body)
        meta = {"cached_tokens": cached, "hidden_states": [rows[cached:].tolist()]}
        return httpx.Response(200, json={"text": "x", "meta_info": meta})

    def prefix(self, body: dict[str, Any]) -> int:
        """The prefix cache: by `extra_key`, all but the last token."""
        known = self.cached.get(body.get("extra_key", "")) == body["input_ids"]
        self.cached[body.get("extra_key", "")] = body["input_ids"]
        return len(body["input_ids"]) - 1 if known else 0

    def error(self, message: str) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": message}})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(make_tiny_llama(tmp_path_factory.mktemp("llama")), BOUNDARIES)


@pytest.fixture(scope="module")
def store(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    data = write_conversations(folder / "data.jsonl", 3, answer_words=60)
    run_extract(extract_config(target.folder, data, folder / "store", output_indices=[1, 3, 5]))
    return folder / "store"


@pytest.fixture
def server(target: Target) -> FakeSglang:
    return FakeSglang(target)


def probe(store: Path, server: Callable[[httpx.Request], httpx.Response], url: str = URL) -> ProbeReport:
    return probe_server(store, url, transport=httpx.MockTransport(server))


def refused(store: Path, server: Callable[[httpx.Request], httpx.Response], url: str = URL) -> Problem:
    with pytest.raises(ProblemsError) as error:
        probe(store, server, url)
    [problem] = error.value.problems
    return problem


def kinds(report: ProbeReport) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_a_server_that_feeds_the_trained_layers_is_right(store: Path, server: FakeSglang) -> None:
    report = probe(store, server)

    assert report.problems == []
    assert [verdict.cause for verdict in report.verdicts] == ["right"] * 3
    assert "SGLang 0.5.23 serves tiny-llama" in report.render()


@pytest.mark.parametrize(("version", "idle"), [("0.5.16", True), ("0.5.17", False), ("0.5.24.dev3", False)])
def test_a_version_that_mixes_up_answers_is_to_be_probed_while_idle(
    store: Path, server: FakeSglang, version: str, idle: bool
) -> None:
    server.version = version

    assert ("probe it while it is idle" in probe(store, server).render()) == idle


def test_the_request_is_the_fingerprints_tokens_and_one_new_token(store: Path, server: FakeSglang) -> None:
    probe(store, server)

    [request] = server.requests
    fingerprint = load_fingerprint(store)[0]
    assert request["input_ids"] == list(fingerprint.token_ids)
    assert request["sampling_params"]["max_new_tokens"] == 1
    assert request["return_hidden_states"] is True


def test_it_can_be_asked_twice_whatever_the_prefix_cache_holds(store: Path, server: FakeSglang) -> None:
    assert probe(store, server).problems == probe(store, server).problems == []
    assert server.requests[0]["extra_key"] != server.requests[1]["extra_key"]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ((1, 3, 5), ["probe.one_early"]),
        ((3, 5, 7), ["probe.one_late"]),
        ((0, 2, 4), ["probe.embedding", "probe.other_layer"]),
        ((6, 2, 4), ["probe.permuted"]),
        ((2, 4, POST_NORM), ["probe.post_norm"]),
    ],
)
def test_wrong_wiring_is_named_and_the_right_ids_are_given(
    store: Path, target: Target, slots: tuple[int, ...], expected: list[str]
) -> None:
    report = probe(store, FakeSglang(target, slots))

    assert kinds(report) == expected
    assert "[1, 3, 5] in eagle_config.eagle_aux_hidden_state_layer_ids is right for SGLang 0.5.23" in (
        report.problems[0].fix
    )


def test_without_neighbours_in_the_fingerprint_it_only_says_that_the_states_are_others(
    store: Path, target: Target, tmp_path: Path
) -> None:
    fingerprint, contract = load_fingerprint(store)
    kept = {index: fingerprint.states[index] for index in contract.output_indices}
    replace(fingerprint, states=kept).save(tmp_path)
    contract.save(tmp_path)

    assert probe(tmp_path, FakeSglang(target)).problems == []
    assert kinds(probe(tmp_path, FakeSglang(target, (1, 3, 5)))) == ["probe.other_states"]
    assert kinds(probe(tmp_path, FakeSglang(target, (4, 2, 6)))) == ["probe.permuted"]


def test_every_cause_has_a_fix_whatever_the_version(store: Path) -> None:
    contract = load_fingerprint(store)[1]

    for version in ("0.5.23", None, "0.4.1", "unheard-of"):
        assert fixes(contract, version).keys() == SENTENCES.keys()
    assert FIXES.keys() == SENTENCES.keys() - {"other_states"}, "a target's neighbouring layers are always at hand"
    assert "find other ids or another version" in fixes(contract, "0.4.1")["one_early"]


def test_a_server_in_bfloat16_is_right(store: Path, server: FakeSglang, target: Target) -> None:
    def answer(states: torch.Tensor) -> torch.Tensor:
        [coarse] = target.states([list(load_fingerprint(store)[0].token_ids)], "bfloat16")
        return torch.cat([coarse[boundary] for boundary in BOUNDARIES], dim=-1).float()

    server.change = answer

    assert probe(store, server).problems == []


def test_other_weights_are_named(store: Path, target: Target) -> None:
    with target.other_weights(0.05):
        assert kinds(probe(store, FakeSglang(target))) == ["probe.other_weights"]


def test_misaligned_rows_are_named(store: Path, server: FakeSglang) -> None:
    server.change = lambda states: states.roll(-1, 0)

    report = probe(store, server)

    assert kinds(report) == ["probe.misaligned"]
    assert "t+1" in report.problems[0].message


def test_a_server_that_is_down_is_one_clear_error(store: Path) -> None:
    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    assert refused(store, down).kind == "server.down"
    with pytest.raises(ProblemsError) as error:
        probe_server(store, "localhost:1")
    assert error.value.problems[0].kind == "server.down"
    with pytest.raises(ProblemsError) as error:
        probe_server(store, "ftp://localhost:1")
    assert error.value.problems[0].kind == "server.down"


@pytest.mark.parametrize("url", ["http://[", "http://a:b:c", "http://server:999999", "://", "http://", ""])
def test_an_address_that_is_none_is_one_clear_error(store: Path, url: str) -> None:
    with pytest.raises(ProblemsError) as error:
        probe_server(store, url)
    assert error.value.problems[0].kind == "server.down"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"object": "list"}),
    ],
)
def test_a_server_that_is_not_sglang_is_one_clear_error(store: Path, answer: httpx.Response) -> None:
    assert refused(store, lambda request: answer).kind == "server.not_sglang"


def test_hidden_states_that_are_not_enabled_are_one_clear_error(store: Path, server: FakeSglang) -> None:
    server.hidden_states_enabled = False

    problem = refused(store, server)

    assert problem.kind == "server.hidden_states_off"
    assert "--enable-return-hidden-states" in problem.fix


def test_another_vocabulary_is_refused_before_the_model_sees_an_id(store: Path, server: FakeSglang) -> None:
    server.vocab = 500

    problem = refused(store, server)

    assert problem.kind == "server.vocabulary"
    assert "512" in problem.message and "499" in problem.message


def test_tokens_from_the_prefix_cache_are_one_clear_error(store: Path, server: FakeSglang) -> None:
    server.change = lambda states: states[10:]

    problem = refused(store, server)

    assert problem.kind == "server.prefix_cache"
    tokens = len(load_fingerprint(store)[0].token_ids)
    assert f"{tokens - 10} of {tokens} tokens" in problem.message


@pytest.mark.parametrize(("width", "kind"), [(64, "no_drafter"), (128, "width"), (65, "width")])
def test_states_of_another_width_are_one_clear_error(store: Path, server: FakeSglang, width: int, kind: str) -> None:
    server.change = lambda states: states[:, :width]

    assert refused(store, server).kind == f"server.{kind}"


@pytest.mark.parametrize(
    "meta",
    [
        *(None, {}, {"hidden_states": []}, {"hidden_states": ["x"]}, {"hidden_states": [[[1.0], [1.0, 2.0]]]}),
        *({"hidden_states": {"a": 1}}, {"hidden_states": [[]]}, {"hidden_states": [[[]]]}),
        *({"hidden_states": True}, {"hidden_states": [[[10**400]]]}),
    ],
)
def test_an_answer_without_usable_states_is_one_clear_error(store: Path, meta: object) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            return httpx.Response(200, json={"meta_info": meta})
        return httpx.Response(200, json={"model_path": "m"})

    assert refused(store, answer).kind == "server.no_states"


def test_a_server_that_ends_meanwhile_is_one_clear_error(store: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            raise httpx.RemoteProtocolError("Server disconnected", request=request)
        return httpx.Response(200, json={"model_path": "m"})

    assert refused(store, answer).kind == "server.no_answer"


def test_other_refusals_are_passed_on(store: Path, server: FakeSglang) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            return httpx.Response(503, json={"error": {"message": "too busy"}})
        return server(request)

    problem = refused(store, answer)

    assert problem.kind == "server.refused"
    assert "503" in problem.message and "too busy" in problem.message


def test_an_api_key_is_sent_and_asked_for(store: Path, server: FakeSglang) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return httpx.Response(401, json={"error": "Unauthorized"})
        return server(request)

    assert refused(store, answer).fix == "give it with --api-key"
    with pytest.raises(ProblemsError, match=r"server\.refused"):
        probe_server(store, URL, api_key="geheim-\u00fc\u7ebf", transport=httpx.MockTransport(answer))
    report = probe_server(store, URL, api_key="secret", transport=httpx.MockTransport(answer))
    assert report.problems == []


def test_states_are_measured_at_the_fingerprints_tokens_and_channels(store: Path, server: FakeSglang) -> None:
    """Garbage anywhere else is not seen, and nothing is compared but what is given."""
    fingerprint: Fingerprint = load_fingerprint(store)[0]

    def spoil(states: torch.Tensor) -> torch.Tensor:
        spoilt = torch.full_like(states, 7.0)
        for slot in range(3):
            columns = [slot * 64 + channel for channel in fingerprint.channels]
            for position in fingerprint.positions:
                spoilt[position, columns] = states[position, columns]
        return spoilt

    server.change = spoil

    assert probe(store, server).problems == []

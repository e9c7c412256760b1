"""Extraction from a server, against one that answers as SGLang does (the real one is in tests/serving)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config import ExtractConfig
from eagle3.data.store import StoreReader
from eagle3.data.store_format import load_manifest
from eagle3.errors import Problem, ProblemsError
from eagle3.target.engines import sglang_client
from eagle3.target.engines.sglang_hook import with_last_hidden_states
from eagle3.target.estimate import dry_run
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.diagnosis import POST_NORM
from tests.unit.target.cases import extract_config, write_conversations
from tests.unit.target.fake_sglang import FakeSglang, FakeTarget

LAYERS = [1, 3, 5]
BOUNDARIES = (2, 4, 6)
SAMPLES = 9
Start = Callable[[FakeSglang], str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "data.jsonl", SAMPLES, answer_words=40)


@pytest.fixture(scope="module")
def served(target: Path) -> FakeTarget:
    return FakeTarget(target, 8)


@pytest.fixture
def server(served: FakeTarget) -> FakeSglang:
    """One that was started as it should be."""
    info = {
        "version": "0.5.23",
        "model_path": "/models/tiny",
        "api_key": "a secret",
        "aux_hidden_state_capture": "eagle3",
        "return_aux_hidden_state_layer_ids": LAYERS,
        "speculative_algorithm": None,
        "chunked_prefill_size": -1,
        "max_req_input_len": 2042,
    }
    return FakeSglang(served, (*BOUNDARIES, POST_NORM), server_info=info)


@pytest.fixture
def plain(served: FakeTarget) -> FakeSglang:
    """One with `--enable-return-hidden-states` alone."""
    info = {"version": "0.5.23", "chunked_prefill_size": -1, "max_req_input_len": 2042}
    return FakeSglang(served, (POST_NORM,), server_info=info)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(sglang_client, "_PAUSE", 0.001)
    monkeypatch.delenv("EAGLE3_API_KEY", raising=False)
    with ExitStack() as running:
        yield lambda fake: running.enter_context(fake.running())


def config(target: Path, data: Path, output: Path, url: str, **values: Any) -> ExtractConfig:
    settings = {"url": url, "attempts": 2, "timeout": 20, **values.pop("server", {})}
    engine = {"output_indices": LAYERS, "engine": "sglang", "server": settings}
    return extract_config(target, data, output, **{**engine, **values})


def refused(cfg: ExtractConfig) -> list[Problem]:
    """The problems; nothing is written."""
    with pytest.raises(ProblemsError) as error:
        run_extract(cfg)
    assert not Path(cfg.output).exists()
    return list(error.value.problems)


def kinds(problems: Sequence[Problem]) -> list[str]:
    return [problem.kind for problem in problems]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_the_store_is_that_of_the_transformers_engine(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    run_extract(extract_config(target, data, tmp_path / "whole", output_indices=LAYERS, engine="transformers"))

    report = run_extract(config(target, data, tmp_path / "served", start(server)))

    assert report.extracted == SAMPLES
    whole, found = StoreReader(tmp_path / "whole"), StoreReader(tmp_path / "served")
    assert found.contract == whole.contract
    assert found.samples == whole.samples
    for index in range(SAMPLES):
        mine, theirs = found.read(index), whole.read(index)
        assert torch.equal(mine.input_ids, theirs.input_ids)
        assert torch.equal(mine.loss_mask, theirs.loss_mask)
        torch.testing.assert_close(mine.aux_hidden_states, theirs.aux_hidden_states, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(mine.last_hidden_states, theirs.last_hidden_states, rtol=1e-5, atol=1e-5)
        assert mine.target_argmax is not None and torch.equal(mine.target_argmax, theirs.target_argmax)
    heads = [load_file(tmp_path / name / "target_head.safetensors") for name in ("whole", "served")]
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    prints = [load_manifest(tmp_path / name).fingerprint for name in ("whole", "served")]
    assert prints[0] and prints[1]
    assert prints[0].states.keys() == prints[1].states.keys() and prints[0].token_ids == prints[1].token_ids
    manifest = (tmp_path / "served" / "manifest.json").read_text()
    assert json.loads(manifest)["provenance"]["server"]["version"] == "0.5.23"
    assert "a secret" not in manifest


def test_many_requests_are_in_flight_and_their_order_does_not_matter(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    url = start(server)
    run_extract(config(target, data, tmp_path / "one", url, server={"concurrency": 1}))
    assert server.most_in_flight == 1
    server.delay = lambda tokens: 0.2 / tokens  # the longer ones overtake

    run_extract(config(target, data, tmp_path / "many", url, server={"concurrency": 4}))

    assert 1 < server.most_in_flight <= 4
    assert shards(tmp_path / "one") == shards(tmp_path / "many")


def test_a_broken_connection_is_tried_again_under_another_prefix_cache(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.failing = 3

    run_extract(config(target, data, tmp_path / "store", start(server), server={"attempts": 4, "concurrency": 1}))

    assert len(StoreReader(tmp_path / "store")) == SAMPLES
    assert len({request["extra_key"] for request in server.requests}) == len(server.requests)


def test_a_server_that_dies_half_way_costs_the_shard_in_work(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    url = start(server)
    cfg = config(target, data, tmp_path / "store", url, shard_max_samples=2, server={"concurrency": 1})
    run_extract(cfg.model_copy(update={"output": str(tmp_path / "whole")}))
    server.answers = 4 + 5  # four samples are checked, five extracted

    with pytest.raises(ProblemsError) as error:
        run_extract(cfg)
    [problem] = error.value.problems
    assert problem.kind == "server.no_answer" and "2 attempts" in problem.message
    assert len(StoreReader(tmp_path / "store", allow_incomplete=True)) == 4

    server.answers = None
    assert run_extract(cfg).extracted == SAMPLES - 4
    assert shards(tmp_path / "store") == shards(tmp_path / "whole")


def test_an_address_where_nothing_answers(target: Path, data: Path, server: FakeSglang, tmp_path: Path) -> None:
    with server.running() as url:
        pass

    [problem] = refused(config(target, data, tmp_path / "store", url, server={"attempts": 1}))

    assert problem.kind == "server.down" and url in problem.where


def test_something_else_answers(target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path) -> None:
    server.model_info = {"hello": "world"}

    assert kinds(refused(config(target, data, tmp_path / "store", start(server)))) == ["server.not_sglang"]


def test_an_api_key_comes_from_the_environment(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key = "open sesame"
    cfg = config(target, data, tmp_path / "store", start(server), server={"api_key_env": "MY_KEY"})

    [problem] = refused(cfg)
    assert problem.kind == "server.refused" and problem.fix == "set MY_KEY"

    monkeypatch.setenv("MY_KEY", "open sesame")
    assert run_extract(cfg).extracted == SAMPLES
    assert "open sesame" not in (tmp_path / "store" / "manifest.json").read_text()


def test_a_dry_run_says_how_to_start_the_server_and_asks_none(target: Path, data: Path, tmp_path: Path) -> None:
    plan = dry_run(config(target, data, tmp_path / "store", "http://nowhere.invalid"))

    assert plan.problems == []
    [line] = [line for line in plan.lines if "sglang.launch_server" in line]
    assert "--return-aux-hidden-state-layer-ids 1 3 5 " in line


def test_everything_that_the_server_itself_says_is_listed_at_once(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.model_info["model_type"] = "qwen3"
    server.server_info |= {"chunked_prefill_size": 8192, "max_req_input_len": 20, "aux_hidden_state_capture": None}

    found = refused(config(target, data, tmp_path / "store", start(server)))

    assert kinds(found) == [
        "server.other_target", "server.chunked_prefill", "server.context", "server.aux_states_off"
    ]  # fmt: skip
    assert "python -m sglang.launch_server --model-path /models/tiny --enable-return-aux-hidden-states" in found[3].fix
    assert "--speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids 1 3 5 " in found[3].fix
    assert server.requests == []


def test_a_version_without_the_option_says_so(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.server_info = {"version": "0.5.22", "speculative_algorithm": None}

    [problem] = refused(config(target, data, tmp_path / "store", start(server)))

    assert problem.kind == "server.aux_states_off"
    assert problem.fix.startswith("serve with SGLang 0.5.23 or newer, 0.5.22 does not know the option")


def test_a_version_that_mixes_up_its_answers_is_refused(
    target: Path, data: Path, server: FakeSglang, plain: FakeSglang, start: Start, tmp_path: Path
) -> None:
    plain.server_info["version"] = "0.5.16"
    both = {"last_states_url": start(plain)}
    first = start(server)
    assert kinds(refused(config(target, data, tmp_path / "store", first, server=both))) == ["server.version"]

    server.server_info = {"version": "0.5.16", "speculative_algorithm": "EAGLE3"}
    assert kinds(refused(config(target, data, tmp_path / "store", first))) == ["server.version"]


def test_a_version_whose_ids_nobody_read_is_refused(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.server_info["version"] = "0.99.0"

    assert kinds(refused(config(target, data, tmp_path / "store", start(server)))) == ["engine.version_unknown"]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([2, 4, 6], "layer ids [2, 4, 6] and captures the outputs of layers 2, 4, 6"),
        ([1, 3], "layer ids [1, 3] and captures the outputs of layers 1, 3"),
        (None, "no layer ids and captures the outputs of layers 1, 3, 4"),
    ],
)
def test_other_layers_are_named(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path, ids: list[int] | None, said: str
) -> None:
    server.server_info["return_aux_hidden_state_layer_ids"] = ids

    [problem] = refused(config(target, data, tmp_path / "store", start(server)))

    assert problem.kind == "server.other_layers"
    assert said in problem.message and "for SGLang 0.5.23 are [1, 3, 5]" in problem.message
    assert "--return-aux-hidden-state-layer-ids 1 3 5 " in problem.fix


def test_the_order_of_the_ids_does_not_matter(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.server_info["return_aux_hidden_state_layer_ids"] = [5, 1, 3]

    assert run_extract(config(target, data, tmp_path / "store", start(server))).extracted == SAMPLES


def test_the_embedding_cannot_be_asked_for(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    found = refused(config(target, data, tmp_path / "store", start(server), output_indices=[-1, 3, 5]))

    assert kinds(found) == ["server.embedding"]


def test_pre_norm_states_cannot_be_asked_for(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    cfg = config(target, data, tmp_path / "store", start(server), last_hidden_states="pre_norm")

    assert kinds(refused(cfg)) == ["server.pre_norm"]


def test_a_second_server_gives_the_last_hidden_states(
    target: Path, data: Path, server: FakeSglang, plain: FakeSglang, start: Start, tmp_path: Path
) -> None:
    first, second = start(server), start(plain)
    run_extract(config(target, data, tmp_path / "one", first))
    server.returned = BOUNDARIES

    found = refused(config(target, data, tmp_path / "none", first))
    assert kinds(found) == ["server.last_states"] and "--forward-hooks" in found[0].fix

    both = {"last_states_url": second}
    run_extract(config(target, data, tmp_path / "two", first, server=both))
    assert shards(tmp_path / "one") == shards(tmp_path / "two")

    plain.vocab_size = 500
    assert kinds(refused(config(target, data, tmp_path / "no", first, server=both))) == ["server.vocabulary"]
    plain.vocab_size = 512
    plain.returned = BOUNDARIES
    assert kinds(refused(config(target, data, tmp_path / "no", first, server=both))) == ["server.last_states"]
    plain.server_info |= {"aux_hidden_state_capture": "eagle3", "chunked_prefill_size": 64}
    assert kinds(refused(config(target, data, tmp_path / "no", first, server=both))) == [
        "server.chunked_prefill", "server.last_states"
    ]  # fmt: skip


@pytest.mark.parametrize("returned", [(2, 4), (2, 4, 6, 7, POST_NORM), (POST_NORM,)])
def test_another_width_is_refused(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path, returned: tuple[Any, ...]
) -> None:
    server.returned = returned

    [problem] = refused(config(target, data, tmp_path / "store", start(server)))

    assert problem.kind == "server.width" and f"returned {64 * len(returned)} values" in problem.message


def test_rows_that_come_from_a_prefix_cache_are_never_made_up(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.uses_extra_key = False

    [problem] = refused(config(target, data, tmp_path / "store", start(server)))

    assert problem.kind == "server.prefix_cache"
    assert "--disable-radix-cache" in problem.fix and "--chunked-prefill-size -1" in problem.fix


def test_rows_that_are_missing_later_end_the_run(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    seen: list[list[int]] = []

    def lose_rows(rows: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        seen.append(tokens)
        return rows if len(seen) < 8 else rows[1:]

    server.change = lose_rows
    cfg = config(target, data, tmp_path / "store", start(server), shard_max_samples=2, server={"concurrency": 1})

    with pytest.raises(ProblemsError) as error:
        run_extract(cfg)

    assert kinds(error.value.problems) == ["server.prefix_cache"]
    assert len(StoreReader(tmp_path / "store", allow_incomplete=True)) == 2


def test_a_smaller_vocabulary_is_found_before_an_id_could_end_the_server(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.vocab_size = 500

    assert kinds(refused(config(target, data, tmp_path / "store", start(server)))) == ["server.vocabulary"]
    assert len(server.requests) == 1


def test_values_of_another_type_are_refused(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.change = lambda rows, tokens: rows.bfloat16().float()

    found = refused(config(target, data, tmp_path / "store", start(server), server={"check_target": False}))

    assert "server.dtype" in kinds(found) and "are bfloat16 values, target.dtype is float32" in found[0].message


@pytest.mark.parametrize("last", [8, 7])
def test_last_hidden_states_that_the_head_does_not_read_are_refused(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path, last: int
) -> None:
    server.returned = (*BOUNDARIES, last)  # before the final norm; of the layer before

    found = refused(config(target, data, tmp_path / "store", start(server), server={"check_target": False}))

    assert kinds(found) == ["server.logits"]


def test_states_that_are_not_finite_are_refused_at_once(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.change = lambda rows, tokens: rows * float("nan")

    found = refused(config(target, data, tmp_path / "store", start(server), server={"check_target": False}))

    assert kinds(found) == ["server.logits"]


def test_rows_of_another_token_are_refused(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    server.change = lambda rows, tokens: rows.roll(1, dims=0)
    url = start(server)

    found = refused(config(target, data, tmp_path / "store", url, server={"check_target": False}))
    assert kinds(found) == ["server.logits"]
    assert "probe.misaligned" in kinds(refused(config(target, data, tmp_path / "store", url)))


def test_other_weights_under_the_same_name_are_refused(
    data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=1)
    url = start(server)

    found = refused(config(other, data, tmp_path / "store", url, server={"check_target": False}))
    assert kinds(found) == ["server.logits"]
    assert "probe.other_target" in kinds(refused(config(other, data, tmp_path / "store", url)))


@pytest.mark.parametrize(("captured", "kind"), [((1, 3, 5), "probe.one_early"), ((4, 2, 6), "probe.permuted")])
def test_layers_other_than_the_server_says_are_found_in_the_numbers(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path, captured: tuple[int, ...], kind: str
) -> None:
    server.returned = (*captured, POST_NORM)

    found = refused(config(target, data, tmp_path / "store", start(server)))

    assert kinds(found) == [kind] and "--return-aux-hidden-state-layer-ids 1 3 5 " in found[0].fix


def test_a_drafters_server_does_not_say_its_layers_so_the_weights_must(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    del server.server_info["aux_hidden_state_capture"]
    server.server_info |= {"version": "0.5.17", "speculative_algorithm": "EAGLE3"}
    url = start(server)

    found = refused(config(target, data, tmp_path / "store", url, server={"check_target": False}))
    assert kinds(found) == ["server.layers_unknown"]
    assert run_extract(config(target, data, tmp_path / "store", url)).extracted == SAMPLES


def test_the_head_is_all_that_is_needed_of_the_weights(
    target: Path,
    data: Path,
    server: FakeSglang,
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "head-only"))
    head = {name: value for name, value in load_file(folder / "model.safetensors").items() if ".layers." not in name}
    save_file(head, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    places = {**dict.fromkeys(head, "model-00002-of-00002.safetensors"), "rest": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    assert run_extract(config(folder, data, tmp_path / "store", start(server))).extracted == SAMPLES

    assert "the states are not compared" in capsys.readouterr().err
    fingerprint = load_manifest(tmp_path / "store").fingerprint
    assert fingerprint and sorted(fingerprint.states) == LAYERS


def test_a_state_that_is_not_finite_is_not_stored(
    target: Path, data: Path, server: FakeSglang, start: Start, tmp_path: Path
) -> None:
    seen: list[list[int]] = []

    def spoil(rows: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        seen.append(tokens)
        return rows if len(seen) != 6 else rows * float("nan")

    server.change = spoil
    with pytest.raises(ProblemsError) as error:
        run_extract(config(target, data, tmp_path / "store", start(server), server={"concurrency": 1}))

    assert set(kinds(error.value.problems)) == {"store.non_finite"}


def test_the_hook_puts_the_last_hidden_states_after_the_aux_states() -> None:
    hook = with_last_hidden_states(None)
    both = SimpleNamespace(hidden_states=torch.ones(2, 6), last_hidden_states=torch.zeros(2, 3))
    aux = SimpleNamespace(hidden_states=torch.ones(2, 6), last_hidden_states=None)
    neither = SimpleNamespace(hidden_states=None, last_hidden_states=None)

    assert hook(None, (), both).hidden_states.tolist() == [[1.0] * 6 + [0.0] * 3] * 2
    assert hook(None, (), aux).hidden_states.shape == (2, 6)
    assert hook(None, (), neither).hidden_states is None

"""`eagle3 regenerate` against servers over real HTTP that fail in every way that they can."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle3.config import ConversationsConfig, RegenerateConfig
from eagle3.data.chat import prepare_samples, render_prompt
from eagle3.data.conversations import load_conversations
from eagle3.errors import EXIT_PROBLEMS, EXIT_STOPPED, ProblemsError
from eagle3.target import regenerate
from eagle3.target.generate import prompt_seed
from eagle3.target.regenerate import plan_regenerate, run_regenerate
from tests.ports import free_port
from tests.unit.target.cases import regenerate_config
from tests.unit.target.fake_answers import FakeAnswers, Fault, answer_ids

TinyTarget = Callable[[str], Path]
Start = Callable[..., str]
COUNT = 12


@pytest.fixture
def start() -> Any:
    with ExitStack() as stack:
        yield lambda fake, port=0: stack.enter_context(fake.running(port))


@pytest.fixture
def make(tiny_target: TinyTarget, tmp_path: Path) -> Callable[..., RegenerateConfig]:
    """A config for these servers; `records` are its prompts."""

    def config(*urls: str, records: Sequence[dict[str, Any]] | None = None, **values: Any) -> RegenerateConfig:
        prompts = tmp_path / "prompts.jsonl"
        if records is None:
            records = [{"id": f"p{number}", "prompt": f"Question {number}?"} for number in range(COUNT)]
        prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
        server = {"urls": list(urls), "model": "/models/tiny", "backoff_seconds": 0.02, "timeout_seconds": 5.0}
        server.update(values.pop("server", {}))
        return regenerate_config(tiny_target("llama"), prompts, tmp_path / "out.jsonl", server=server, **values)

    return config


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def failed(cfg: RegenerateConfig) -> dict[str, str]:
    path = Path(f"{cfg.output}.failed.jsonl")
    return {line["id"]: line["reason"] for line in read(str(path))} if path.exists() else {}


def right(cfg: RegenerateConfig) -> None:
    """Every line holds the ids that the servers give for the prompt that its messages render to."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    for line in read(cfg.output):
        prompt = render_prompt(tokenizer, line["messages"][:-1])
        assert line["answer_ids"] == answer_ids(prompt, cfg.max_new_tokens), line["id"]


def kinds(cfg: RegenerateConfig) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        run_regenerate(cfg)
    return [problem.kind for problem in caught.value.problems]


def test_answers_are_the_servers_own_ids_and_extraction_takes_them(make: Any, start: Start) -> None:
    fake = FakeAnswers(delay=0.03)
    cfg = make(start(fake), server={"concurrency": 4})
    report = run_regenerate(cfg)
    lines = read(cfg.output)
    assert [line["id"] for line in lines] == [f"p{number}" for number in range(COUNT)]
    right(cfg)
    assert fake.most_in_flight == 4
    assert report.exit_code == 0 and report.stopped == COUNT
    assert report.answer_tokens == report.tokens == sum(len(line["answer_ids"]) for line in lines)
    assert report.prompt_tokens == sum(len(body["input_ids"]) for body in fake.requests)
    conversations, _ = load_conversations(ConversationsConfig(path=cfg.output))
    samples, _ = prepare_samples(AutoTokenizer.from_pretrained(cfg.target.path), conversations, 2048)
    for sample, line in zip(samples, lines, strict=True):
        assert [token for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on] == line["answer_ids"]


@pytest.mark.parametrize(
    "fault", ["hang", "cut", "drop", "json", "ids", "empty", "endless", "abort", "500", "429", "503"]
)
def test_a_fault_is_tried_again(make: Any, start: Start, fault: str) -> None:
    """Every third request fails so."""
    fake = FakeAnswers(fault=lambda number, _: fault if number % 3 == 1 else None)
    cfg = make(start(fake), server={"timeout_seconds": 0.3 if fault == "hang" else 5.0, "concurrency": 6})
    report = run_regenerate(cfg)
    assert (report.answers, report.failed) == (COUNT, 0)
    assert len(fake.requests) > COUNT
    assert "failures" in report.servers[0]
    right(cfg)


def test_retry_after_is_heeded(make: Any, start: Start) -> None:
    fake = FakeAnswers(fault=lambda number, _: "429:0.6" if number == 0 else None)
    cfg = make(start(fake), server={"concurrency": 1})
    run_regenerate(cfg)
    assert fake.times[1] - fake.times[0] >= 0.6


def test_what_fails_for_good_is_listed_and_alone_asked_again(make: Any, start: Start) -> None:
    bad: dict[str, str] = {"p3": "500", "p7": "400"}
    fake = FakeAnswers()
    cfg = make(start(fake), server={"retries": 2})
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    prompts = {name: render_prompt(tokenizer, [{"role": "user", "content": f"Question {name[1:]}?"}]) for name in bad}

    def fault(_: int, body: Any) -> Fault:
        return next((bad[name] for name, ids in prompts.items() if body["input_ids"] == ids), None)

    fake.fault = fault
    report = run_regenerate(cfg)
    assert (report.answers, report.failed, report.exit_code) == (COUNT - 2, 2, EXIT_PROBLEMS)
    found = failed(cfg)
    assert found.keys() == bad.keys()
    assert "3 attempts" in found["p3"] and "(400)" in found["p7"]
    assert sum(body["input_ids"] == prompts["p3"] for body in fake.requests) == 3
    assert sum(body["input_ids"] == prompts["p7"] for body in fake.requests) == 1
    assert f"{cfg.output}.failed.jsonl" in report.render()
    fake.fault, fake.requests = lambda *_: None, []
    again = run_regenerate(cfg)
    assert (again.answers, again.generated, again.exit_code) == (COUNT, 2, 0)
    assert [line["id"] for line in read(cfg.output)] == [f"p{number}" for number in range(COUNT)]
    assert not failed(cfg) and len(fake.requests) == 2


def test_a_dead_server_of_two_is_reported_and_the_other_answers_all(
    make: Any, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeAnswers()
    dead = f"http://127.0.0.1:{free_port()}"
    cfg = make(dead, start(fake))
    report = run_regenerate(cfg)
    assert (report.answers, report.failed) == (COUNT, 0)
    assert "cannot be reached" in report.servers[0] and f"{COUNT} answers" in report.servers[1]
    assert f"{dead}: cannot be reached" in capsys.readouterr().err


def test_two_servers_share_the_work(make: Any, start: Start) -> None:
    fakes = [FakeAnswers(delay=0.02), FakeAnswers(delay=0.02)]
    run_regenerate(make(*map(start, fakes), server={"concurrency": 2}))
    assert [len(fake.requests) for fake in fakes] == [COUNT // 2] * 2


def starting(start: Start, late: FakeAnswers, port: int) -> Callable[[int, Any], Fault]:
    """Of a server that starts another one at its second request, and lets the fourth wait until that one is known."""

    def fault(number: int, _: Any) -> Fault:
        if number == 1:
            start(late, port)
        if number == 3:
            late.asked_who.wait(4)
        return None

    return fault


def test_a_server_that_comes_back_is_asked_again_once_it_is_known_to_be_the_same(make: Any, start: Start) -> None:
    port = free_port()
    late = FakeAnswers()
    others = FakeAnswers(fault=starting(start, late, port), delay=0.1)
    cfg = make(f"http://127.0.0.1:{port}", start(others), server={"concurrency": 1})
    run_regenerate(cfg)
    assert late.requests and len(late.requests) + len(others.requests) == COUNT
    right(cfg)


def test_one_that_comes_back_as_another_model_is_left_out(make: Any, start: Start) -> None:
    port = free_port()
    late = FakeAnswers(fields={"model_type": "qwen3"})
    others = FakeAnswers(fault=starting(start, late, port), delay=0.1)
    cfg = make(f"http://127.0.0.1:{port}", start(others), server={"concurrency": 1})
    report = run_regenerate(cfg)
    assert report.answers == COUNT and not late.requests
    assert "left out" in report.servers[0]


def test_a_server_that_dies_for_good_leaves_what_it_answered(make: Any, start: Start, tmp_path: Path) -> None:
    fake = FakeAnswers(fault=lambda number, _: "503" if number >= 5 else None)
    url = start(fake)
    cfg = make(url, server={"concurrency": 1, "retries": 2})
    assert kinds(cfg) == ["server.down"]
    assert not Path(cfg.output).exists()
    assert len(read(f"{cfg.output}.partial")) == 5
    fake.fault, fake.requests = lambda *_: None, []
    assert run_regenerate(cfg).generated == COUNT - 5 == len(fake.requests)
    right(cfg)


def test_a_server_that_fails_at_everything_ends_the_run(make: Any, start: Start) -> None:
    records = [{"id": f"p{number}", "prompt": f"Question {number}?"} for number in range(60)]
    fake = FakeAnswers(fault=lambda number, _: "500")
    cfg = make(start(fake), records=records, server={"concurrency": 1, "retries": 1})
    assert kinds(cfg) == ["server.failing"]
    assert len(fake.requests) == 16
    assert len(failed(cfg)) == 7


@pytest.mark.parametrize(
    ("values", "server", "kind"),
    [
        ({"fields": {"model_type": "qwen3"}}, {}, "server.other_target"),
        ({"name": "other"}, {"model": None}, "server.other_target"),
        ({"vocab_size": 500}, {}, "server.vocabulary"),
        ({"tokens": [1, 2, 3]}, {}, "server.other_tokenizer"),
        ({"api_key": "secret"}, {}, "server.api_key"),
        ({"kind": "completions", "name": "other"}, {"model": None}, "server.other_target"),
        ({"kind": "completions"}, {"model": "absent"}, "server.model"),
        ({"kind": "completions"}, {"api": "sglang"}, "server.not_sglang"),
        ({"kind": "sglang"}, {"api": "chat", "model": "tiny"}, "server.not_openai"),
        ({"kind": "chat", "count": lambda right: right + 1}, {"model": "tiny"}, "server.refused"),
    ],
)
def test_a_server_of_something_else_is_refused(
    make: Any, start: Start, values: dict[str, Any], server: dict[str, Any], kind: str
) -> None:
    fake = FakeAnswers(**values)
    good = FakeAnswers()
    cfg = make(start(good), start(fake), server=server)
    assert kind in kinds(cfg)
    assert not good.requests
    assert not Path(f"{cfg.output}").exists()


@pytest.mark.parametrize(("kind", "model"), [("sglang", "/models/tiny"), ("completions", "tiny")])
def test_a_server_that_fails_to_tokenize_answers_all_the_same(make: Any, start: Start, kind: str, model: str) -> None:
    """SGLang 0.5.16, for a tokenizer without a longest length."""
    cfg = make(start(FakeAnswers(kind=kind, tokens="fails")), server={"model": model})
    assert run_regenerate(cfg).stopped == COUNT
    right(cfg)


def test_addresses_that_cannot_be_used_are_all_named_without_their_secrets(make: Any) -> None:
    cfg = make("ftp://a", "http://user:secret@b:1", "http://c", "http://c/v1/", "http://d:99999")
    with pytest.raises(ProblemsError) as caught:
        run_regenerate(cfg)
    assert [problem.kind for problem in caught.value.problems] == ["server.url"] * 4
    assert "secret" not in str(caught.value)


def test_the_key_is_sent_and_stands_nowhere(
    make: Any, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    fake = FakeAnswers(api_key="very-secret")
    cfg = make(start(fake), server={"api_key_env": "MY_KEY"})
    report = run_regenerate(cfg)
    assert report.answers == COUNT
    written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    told = capsys.readouterr()
    assert "very-secret" not in written + report.render() + told.out + told.err


def test_completions_are_asked_with_ids_and_give_ids(make: Any, start: Start) -> None:
    fake = FakeAnswers(kind="completions")
    cfg = make(f"{start(fake)}/v1", server={"model": "tiny"})
    run_regenerate(cfg)
    right(cfg)
    assert all(body["model"] == "tiny" and body["return_token_ids"] for body in fake.requests)


def test_a_server_without_ids_gives_text_and_counts(
    make: Any, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = make(start(FakeAnswers(kind="completions", gives_ids=False)), server={"model": "tiny"})
    report = run_regenerate(cfg)
    lines = read(cfg.output)
    assert all("answer_ids" not in line and line["messages"][-1]["content"] == "text of the server" for line in lines)
    assert report.tokens == sum(line["answer_tokens"] for line in lines) > COUNT
    assert "text only" in capsys.readouterr().err
    assert run_regenerate(cfg).generated == 0
    conversations, _ = load_conversations(ConversationsConfig(path=cfg.output))
    assert len(conversations) == COUNT


def test_chat_is_asked_with_messages_and_its_prompt_counted(make: Any, start: Start) -> None:
    fake = FakeAnswers(kind="chat")
    records = [{"id": f"p{number}", "prompt": f"Question {number}?"} for number in range(3)]
    cfg = make(start(fake), records=records, server={"model": "tiny"})
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    fake.render = lambda messages: render_prompt(tokenizer, messages)
    run_regenerate(cfg)
    right(cfg)
    fake.count = lambda right: right + (right > 25)
    longer = make(
        cfg.server.urls[0], records=[*records, {"id": "long", "prompt": "many words " * 9}], server={"model": "tiny"}
    )
    assert run_regenerate(longer).failed == 1
    assert "prompt tokens" in failed(longer)["long"]


def test_sampling_is_said_whole_and_each_seed_is_the_prompts_own(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    cfg = make(start(fake), temperature=0.7, top_p=0.9, top_k=40, seed=3)
    run_regenerate(cfg)
    params = [body["sampling_params"] for body in fake.requests]
    assert {(item["temperature"], item["top_p"], item["top_k"]) for item in params} == {(0.7, 0.9, 40)}
    seeds = {item["sampling_seed"] for item in params}
    assert seeds == {prompt_seed(3, f"p{number}") for number in range(COUNT)}


def multi_turn(turns: int) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"Turn {turn}"}, {"role": "assistant", "content": f"old {turn}"}]
    return {"id": "talk", "messages": messages}


def test_every_turn_is_made_anew_behind_the_new_ones(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    cfg = make(start(fake), records=[multi_turn(3), {"id": "one", "prompt": "Hi"}])
    report = run_regenerate(cfg)
    lines = read(cfg.output)
    assert [line["id"] for line in lines] == ["talk#1", "talk#3", "talk#5", "one"] and report.generated == 4
    right(cfg)
    assert not any("old" in message["content"] for line in lines for message in line["messages"])
    for earlier, later in pairwise(lines[:3]):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
    assert run_regenerate(cfg).generated == 0


def test_turns_after_one_that_was_cut_or_failed_are_not_asked(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    cut = make(start(fake), records=[multi_turn(3)], max_new_tokens=1)
    report = run_regenerate(cut)
    assert (report.answers, report.after_cut, report.failed) == (1, 2, 0)
    assert "2 turns after an answer that was cut" in report.render()
    refusing = FakeAnswers(fault=lambda number, _: "400" if number == 1 else None)
    cfg = make(start(refusing), records=[multi_turn(3)]).model_copy(update={"output": f"{cut.output}.2"})
    assert run_regenerate(cfg).failed == 2
    assert list(failed(cfg)) == ["talk#3", "talk#5"]
    assert run_regenerate(cfg).generated == 2


def test_a_tools_result_keeps_the_call_before_it(make: Any, start: Start) -> None:
    talk = multi_turn(1)["messages"]
    call = {"role": "assistant", "content": "calling"}
    record = {"id": "t", "messages": [talk[0], call, {"role": "tool", "content": "42"}, *talk[1:]]}
    cfg = make(start(FakeAnswers()), records=[record])
    run_regenerate(cfg)
    (line,) = read(cfg.output)
    assert line["id"] == "t" and line["messages"][1] == call


def test_resume_is_by_prompt_whatever_the_order_names_or_other_records(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    url = start(fake)
    run_regenerate(make(url))
    fake.requests.clear()
    records = [{"id": f"p{number}", "prompt": f"Question {number}?"} for number in reversed(range(COUNT))]
    records[0] = {**records[0], "id": "renamed"}
    records[1] = {**records[1], "prompt": "Another question"}
    del records[5]
    cfg = make(url, records=[{"id": "new", "prompt": "New"}, *records])
    report = run_regenerate(cfg)
    assert report.generated == len(fake.requests) == 2
    assert [line["id"] for line in read(cfg.output)] == ["new", *(record["id"] for record in records)]
    right(cfg)
    # What was not asked for that time is not lost.
    fake.requests.clear()
    assert run_regenerate(make(url)).generated == 0 and not fake.requests
    assert sorted(line["id"] for line in read(cfg.output)) == sorted(f"p{number}" for number in range(COUNT))


def test_an_answers_file_of_an_earlier_release_goes_on(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    cfg = make(start(fake))
    run_regenerate(cfg)
    whole = read(cfg.output)
    sidecar = Path(f"{cfg.output}.settings.json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "conversations": "sha256:0"}))
    old = [{key: value for key, value in line.items() if key != "prompt_digest"} for line in whole[:7]]
    Path(cfg.output).write_text("".join(json.dumps(line) + "\n" for line in old))
    fake.requests.clear()
    assert run_regenerate(cfg).generated == COUNT - 7 == len(fake.requests)
    assert read(cfg.output) == whole


def test_cut_answers_are_dropped_and_not_asked_again(make: Any, start: Start) -> None:
    fake = FakeAnswers()
    url = start(fake)
    cfg = make(url, cut_off="drop", max_new_tokens=4)
    report = run_regenerate(cfg)
    assert 0 < report.dropped < COUNT and report.answers == report.stopped == COUNT - report.dropped
    assert all(line["finish"] == "stop" for line in read(cfg.output))
    fake.requests.clear()
    assert run_regenerate(cfg).generated == 0
    marked = run_regenerate(make(url, max_new_tokens=4))
    assert (marked.answers, marked.generated, len(fake.requests)) == (COUNT, 0, 0)
    assert sum(line["finish"] == "length" for line in read(cfg.output)) == report.dropped


def test_the_plan_counts_exactly_and_asks_nobody(
    make: Any, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.progress._PLAIN_INTERVAL_SECONDS", 0.0)
    fake = FakeAnswers()
    prices = {"price_per_million_tokens": {"input": 1000.0, "output": 1e5}}
    cfg = make(start(fake), server=prices)
    plan = plan_regenerate(cfg)
    assert not fake.requests
    report = run_regenerate(cfg)
    assert (plan.prompts, plan.done, plan.first_tokens) == (COUNT, 0, report.prompt_tokens)
    assert plan.most_answer_tokens == COUNT * cfg.max_new_tokens
    assert plan.cost == pytest.approx(plan.first_tokens / 1e3 + plan.most_answer_tokens / 10)
    assert report.cost == pytest.approx(report.prompt_tokens / 1e3 + report.answer_tokens / 10)
    told = capsys.readouterr().err
    assert plan.render() in told and "cost" in told and "tokens/s" in told
    assert plan_regenerate(cfg).prompts == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_answers_that_came(make: Any, start: Start, number: int) -> None:
    fake = FakeAnswers(fault=lambda number, _: "hang" if number >= 5 else None)
    cfg = make(start(fake), server={"concurrency": 2})

    def interrupt() -> None:
        while len(fake.requests) < 7:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    report = run_regenerate(cfg)
    thread.join()
    assert (report.generated, report.exit_code, report.interrupted) == (5, EXIT_STOPPED, True)
    assert not Path(cfg.output).exists() and len(read(f"{cfg.output}.partial")) == 5
    fake.fault = lambda *_: None
    assert run_regenerate(cfg).generated == COUNT - 5
    right(cfg)


def test_a_finished_file_asks_no_server(make: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make(start(FakeAnswers()))
    run_regenerate(cfg)
    monkeypatch.setattr(regenerate, "answer_from_servers", lambda *_: pytest.fail("asked"))
    assert run_regenerate(cfg).generated == 0

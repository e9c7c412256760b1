from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eagle3.config import ConversationsConfig, RegenerateConfig
from eagle3.data.chat import prepare_samples, render_prompt
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.errors import ProblemsError
from eagle3.target import regenerate
from eagle3.target.answer_file import AnswerFile
from eagle3.target.dialogue import text_for_history
from eagle3.target.generate import Generated
from eagle3.target.regenerate import iter_answers, make_prompts, run_regenerate
from tests.unit.target.cases import make_engine, regenerate_config
from tests.unit.target.test_generate import greedy_alone

TinyTarget = Callable[[str], Path]


def write_prompts(path: Path) -> Path:
    """All accepted forms, of different lengths, the longest first."""
    user = {"role": "user", "content": "What is the capital of France?"}
    lines: list[dict] = [
        {"id": "p0", "source": "s", "messages": [{"role": "system", "content": "Be short."}, user]},
        {"id": "p1", "messages": [user, {"role": "assistant", "content": "An old answer."}]},
        {"id": "p2", "prompt": "Hi"},
        {"id": "p3", "messages": [user, {"role": "assistant", "content": "Paris."}, {**user, "content": "Sure?"}]},
        *({"id": f"p{number}", "prompt": " ".join(["add two and three"] * number)} for number in range(4, 10)),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def cfg(tiny_target: TinyTarget, tmp_path: Path) -> RegenerateConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return regenerate_config(tiny_target("llama"), prompts, tmp_path / "out.jsonl", turns="last")


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_answers_are_the_targets_own_in_the_order_of_the_prompts(cfg: RegenerateConfig) -> None:
    report = run_regenerate(cfg)
    lines = read(cfg.output)
    assert [line["id"] for line in lines] == [f"p{number}" for number in range(10)]
    assert (report.answers, report.generated) == (10, 10)
    assert report.tokens == sum(len(line["answer_ids"]) for line in lines)
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    model = make_engine(Path(cfg.target.path), [0]).model
    for line in lines:
        prompt = render_prompt(tokenizer, line["messages"][:-1])
        expected = greedy_alone(model, prompt, cfg.max_new_tokens, [511])
        assert (line["answer_ids"], line["finish"]) == (expected.ids, expected.finish)
    assert lines[0]["source"] == "s" and lines[1]["source"] is None


def test_the_last_user_turn_is_answered_and_an_old_answer_dropped(cfg: RegenerateConfig) -> None:
    run_regenerate(cfg)
    lines = {line["id"]: line["messages"] for line in read(cfg.output)}
    assert [message["role"] for message in lines["p0"]] == ["system", "user", "assistant"]
    assert [message["role"] for message in lines["p1"]] == ["user", "assistant"]
    assert lines["p1"][-1]["content"] != "An old answer."
    assert [message["role"] for message in lines["p3"]] == ["user", "assistant", "user", "assistant"]
    assert lines["p3"][1]["content"] == "Paris."


@pytest.mark.parametrize("name", ["llama", "kimi"])
def test_extraction_takes_the_output_with_its_own_token_ids(tiny_target: TinyTarget, tmp_path: Path, name: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    cfg = regenerate_config(tiny_target(name), prompts, tmp_path / "out.jsonl", data={"limit": 3})
    run_regenerate(cfg)
    conversations, dropped = load_conversations(ConversationsConfig(path=cfg.output))
    assert not dropped
    tokenizer = AutoTokenizer.from_pretrained(tiny_target(name))
    samples, _ = prepare_samples(tokenizer, conversations, 2048)
    for sample, line in zip(samples, read(cfg.output), strict=True):
        supervised = [token for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]
        assert supervised == line["answer_ids"]


def kill_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    append, count = AnswerFile.append, [0]

    def killing(self: AnswerFile, lines: list) -> None:
        if count[0] == batches:
            raise KeyboardInterrupt
        count[0] += 1
        append(self, lines)

    monkeypatch.setattr(AnswerFile, "append", killing)


def test_a_killed_run_goes_on_and_ends_with_the_same_file(
    cfg: RegenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cfg.model_copy(update={"output": f"{cfg.output}.whole.jsonl"})
    run_regenerate(whole)
    with monkeypatch.context() as patch:
        kill_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run_regenerate(cfg)
    partial = Path(f"{cfg.output}.partial")
    assert not Path(cfg.output).exists()
    finished = partial.read_bytes()
    assert finished.count(b"\n") == 4
    # A kill in the middle of the second write: one whole line more, and half of the next.
    done = [json.loads(line) for line in finished.splitlines()]
    more = [line for line in Path(whole.output).read_bytes().splitlines() if json.loads(line) not in done][:2]
    partial.write_bytes(finished + more[0] + b"\n" + more[1][:40])
    report = run_regenerate(cfg)
    assert (report.answers, report.generated) == (10, 5)
    assert Path(cfg.output).read_bytes() == Path(whole.output).read_bytes()
    assert not partial.exists()


def test_a_finished_file_needs_no_target(cfg: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run_regenerate(cfg)
    before = Path(cfg.output).read_bytes()
    monkeypatch.setattr(regenerate, "load_model", lambda *args: pytest.fail("loaded the target"))
    assert run_regenerate(cfg).generated == 0
    assert Path(cfg.output).read_bytes() == before


def test_resume_under_other_settings_lists_each(cfg: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run_regenerate(cfg)
    before = Path(cfg.output).read_bytes()
    monkeypatch.setattr(regenerate, "load_model", lambda *args: pytest.fail("loaded the target"))
    other = cfg.model_copy(
        update={
            "max_new_tokens": 9,
            "temperature": 0.5,
            "data": cfg.data.model_copy(update={"limit": 5, "chat_template_kwargs": {"thinking": False}}),
            "target": cfg.target.model_copy(update={"dtype": "bfloat16"}),
            "batch_size": 2,
        }
    )
    with pytest.raises(ProblemsError) as caught:
        run_regenerate(other)
    words = ["max_new_tokens", "temperature", "seed", "chat_template_kwargs.thinking", "target.dtype"]
    messages = [problem.message for problem in caught.value.problems]
    assert len(messages) == len(words)
    for word in words:
        assert any(f"settings.{word}:" in message for message in messages), word
    assert Path(cfg.output).read_bytes() == before


def test_a_file_of_somebody_else_is_not_touched(cfg: RegenerateConfig) -> None:
    Path(cfg.output).write_text("mine\n")
    with pytest.raises(ProblemsError, match=r"regenerate\.foreign"):
        run_regenerate(cfg)
    assert Path(cfg.output).read_text() == "mine\n"


def test_a_damaged_line_is_named(cfg: RegenerateConfig) -> None:
    run_regenerate(cfg)
    lines = Path(cfg.output).read_text().splitlines()
    Path(cfg.output).write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    with pytest.raises(ProblemsError, match=r"regenerate\.damaged.*out\.jsonl:2"):
        run_regenerate(cfg)


def test_a_second_run_is_refused(cfg: RegenerateConfig) -> None:
    with AnswerFile(Path(cfg.output), {}), pytest.raises(ProblemsError, match=r"regenerate\.locked"):
        run_regenerate(cfg)


def test_prompts_that_are_too_long_are_left_out_and_counted(cfg: RegenerateConfig) -> None:
    short = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_length": 30})})
    report = run_regenerate(short)
    assert 0 < report.too_long < 10
    assert report.answers + report.too_long == 10
    assert f"{report.too_long} prompts that are too long" in report.render()
    none = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_length": 2}), "output": f"{cfg.output}2"})
    with pytest.raises(ProblemsError, match=r"regenerate\.too_long"):
        run_regenerate(none)


def test_a_record_without_a_prompt_is_an_error_or_counted(cfg: RegenerateConfig) -> None:
    with Path(cfg.data.path).open("a") as handle:
        handle.write(json.dumps({"id": "bad", "messages": [{"role": "assistant", "content": "Hello"}]}) + "\n")
    with pytest.raises(ProblemsError, match=r"chat\.assistant_first.*bad"):
        run_regenerate(cfg)
    skipping = cfg.model_copy(update={"data": cfg.data.model_copy(update={"skip_bad": True})})
    report = run_regenerate(skipping)
    assert (report.answers, report.skipped) == (10, {"chat.assistant_first": 1})


def test_a_prompt_that_spells_control_tokens_is_an_error_or_counted_once(cfg: RegenerateConfig) -> None:
    typed = [{"role": role, "content": "<|im_end|>"} for role in ("system", "user")]
    with Path(cfg.data.path).open("a") as handle:
        handle.write(json.dumps({"id": "bad", "messages": typed}) + "\n")
    with pytest.raises(ProblemsError, match="1 prompts cannot be rendered") as caught:
        run_regenerate(cfg)
    assert [(item.where, item.kind) for item in caught.value.problems] == [("bad", "chat.control_token")] * 2
    report = run_regenerate(cfg.model_copy(update={"data": cfg.data.model_copy(update={"skip_bad": True})}))
    assert (report.answers, report.skipped) == (10, {"chat.control_token": 1})
    assert "1 bad records (1 chat.control_token)" in report.render()


def test_batch_size_does_not_change_greedy_answers(cfg: RegenerateConfig) -> None:
    run_regenerate(cfg)
    single = cfg.model_copy(update={"batch_size": 1, "output": f"{cfg.output}.single.jsonl"})
    run_regenerate(single)
    assert Path(cfg.output).read_bytes() == Path(single.output).read_bytes()


def test_an_answer_ends_where_the_context_does(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    tokenizer = AutoTokenizer.from_pretrained(tiny_target("llama"))
    asked = Conversation("a", [{"role": "user", "content": "Hi"}])
    (prompt,), problems = make_prompts(tokenizer, [asked])
    assert not problems
    room = len(prompt.input_ids) + 3
    (batch,) = iter_answers(model, [prompt], max_new_tokens=50, batch_size=1, context_length=room)
    ((_, answer),) = batch
    assert len(answer.ids) == 3 and answer.finish == "length"


def test_answers_that_are_done_are_not_given_again(cfg: RegenerateConfig) -> None:
    model = make_engine(Path(cfg.target.path), [0]).model
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)
    conversations, _ = load_conversations(cfg.data)
    prompts, _ = make_prompts(tokenizer, conversations)

    def answers(done: frozenset[str]) -> dict[str, list[int]]:
        batches = iter_answers(model, prompts, max_new_tokens=4, batch_size=4, context_length=2048, done=done)
        return {prompt.id: answer.ids for batch in batches for prompt, answer in batch}

    whole = answers(frozenset())
    assert whole.keys() == {prompt.id for prompt in prompts}
    done = frozenset(["p2", "p4", "p9"])
    assert answers(done) == {name: ids for name, ids in whole.items() if name not in done}


def test_a_full_disk_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"disk\.full"), AnswerFile(tmp_path / "out.jsonl", {}) as output:
        with open("/dev/full", "ab") as full:
            os.dup2(full.fileno(), output._handle.fileno())
        output.append([{"id": "a", "answer_ids": [1], "finish": "stop"}])


@pytest.mark.parametrize("name", [".", ""])
def test_a_folder_as_output_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProblemsError, match=r"regenerate\.output"):
        AnswerFile(tmp_path / name, {})
    assert list(tmp_path.parent.glob(f"{tmp_path.name}.*")) == []


def test_a_prompt_without_a_token_is_refused(cfg: RegenerateConfig, tmp_path: Path) -> None:
    folder = shutil.copytree(cfg.target.path, tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{{ '' }}")
    with pytest.raises(ProblemsError, match=r"chat\.empty_prompt"):
        run_regenerate(regenerate_config(folder, Path(cfg.data.path), tmp_path / "out.jsonl"))


def test_every_turn_is_answered_behind_the_new_answers(cfg: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three conversations go on; the third one's first answer is cut."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "old"}] * 2
    questions = ["Hi", "What is the capital of France?", "add two and three"]
    records = [
        {"id": f"t{number}", "messages": [{**turns[0], "content": question}, *turns[1:]]}
        for number, question in enumerate(questions, start=1)
    ]
    Path(cfg.data.path).write_text("".join(json.dumps(record) + "\n" for record in records))
    talks = cfg.model_copy(update={"turns": "all"})
    model = make_engine(Path(cfg.target.path), [0]).model
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.path)

    def alone(messages: list) -> Generated:
        return greedy_alone(model, render_prompt(tokenizer, messages), 5, stops)

    firsts = [greedy_alone(model, render_prompt(tokenizer, record["messages"][:1]), 5, []) for record in records]
    ends = [next(token for token in first.ids if token not in firsts[2].ids) for first in firsts[:2]]
    stops = sorted({511, *ends})
    monkeypatch.setattr(regenerate, "eos_ids", lambda _: tuple(stops))
    talks = talks.model_copy(update={"max_new_tokens": 5})
    report = run_regenerate(talks)
    lines = read(talks.output)
    assert [line["id"] for line in lines] == ["t1#1", "t1#3", "t2#1", "t2#3", "t3#1"]
    assert (report.generated, report.after_cut) == (5, 1)
    for line in lines:
        expected = alone(line["messages"][:-1])
        assert (line["answer_ids"], line["finish"]) == (expected.ids, expected.finish)
    assert lines[1]["messages"][:2] == lines[0]["messages"]
    whole = Path(talks.output).read_bytes()
    Path(talks.output).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines[:3]))
    assert run_regenerate(talks).generated == 2
    assert Path(talks.output).read_bytes() == whole


def test_each_of_a_list_of_turns_is_answered_before_the_next(
    cfg: RegenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"question_id": 81, "category": "writing", "turns": ["Hi", "Shorter."]}
    Path(cfg.data.path).write_text(json.dumps(record) + "\n")
    with pytest.raises(ProblemsError, match=r"regenerate\.turns"):
        run_regenerate(cfg)
    talks = cfg.model_copy(update={"turns": "all"})
    model, tokenizer = make_engine(Path(cfg.target.path), [0]).model, AutoTokenizer.from_pretrained(cfg.target.path)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    end = greedy_alone(model, prompt, 3, []).ids[-1]  # or the second turn would not be asked
    monkeypatch.setattr(regenerate, "eos_ids", lambda _: (end,))
    run_regenerate(talks)
    first, second = read(talks.output)
    assert (first["id"], second["id"], first["source"]) == ("81#1", "81#3", "writing")
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user", "assistant"]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "user", "content": "Shorter."}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Yes.", "Yes."),
        ("<think>\nlong\n</think>\n\nYes.", "Yes."),
        ("its prompt opened it</think>Yes.", "Yes."),
        ("  a space", "  a space"),
    ],
)
def test_an_answer_stands_in_a_history_without_its_reasoning(text: str, kept: str) -> None:
    assert text_for_history(text) == kept


def test_names_that_would_meet_are_refused(cfg: RegenerateConfig) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}] * 2
    records = [{"id": "a", "messages": talk}, {"id": "a#1", "prompt": "Hi"}]
    Path(cfg.data.path).write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ProblemsError, match=r"chat\.duplicate_id"):
        run_regenerate(cfg.model_copy(update={"turns": "all"}))

"""Formats of conversations: what each becomes, which one a record is in, and every way in which a record is bad."""

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from eagle3.config import ConversationsConfig
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.errors import ProblemsError
from tests.hub import local_hub

from .cases import kinds

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
BY_FORMAT: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": SHAREGPT},
    "alpaca": {"instruction": "2 + 2?", "input": "", "output": "4"},
    "prompts": {"prompt": "2 + 2?"},
}


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


def load(path: str, **options: Any) -> list[Conversation]:
    return load_conversations(ConversationsConfig(path=path, **options))[0]


def one(folder: Path, record: Any, **options: Any) -> list[dict[str, Any]]:
    [conversation] = load(write(folder / "data.jsonl", record), **options)
    return conversation.messages


def faults(folder: Path, record: Any, **options: Any) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        load(write(folder / "data.jsonl", record), **options)
    return [kind.removeprefix("conversations.") for kind in kinds(error.value)]


@pytest.mark.parametrize("name", BY_FORMAT)
@pytest.mark.parametrize("given", [False, True])
def test_a_format_is_told_by_its_columns_or_given(tmp_path: Path, name: str, given: bool) -> None:
    messages = one(tmp_path, BY_FORMAT[name], **({"format": name} if given else {}))
    assert messages == ([USER] if name == "prompts" else [USER, ANSWER])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("developer", "developer"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("function_response", "tool"),
    ],
)
def test_sharegpt_names_of_roles(tmp_path: Path, name: str, role: str) -> None:
    assert one(tmp_path, {"conversations": [{"from": name, "value": "x"}]}) == [{"role": role, "content": "x"}]


def test_sharegpt_calls_results_system_and_tools(tmp_path: Path) -> None:
    record = {
        "system": "Use tools.",
        "tools": json.dumps([{"name": "add"}]),
        "conversations": [
            SHAREGPT[0],
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
    }
    [conversation] = load(write(tmp_path / "data.jsonl", record))
    assert conversation.messages == [
        {"role": "system", "content": "Use tools."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        ANSWER,
    ]
    assert conversation.tools == [{"name": "add"}]


def test_alpaca_input_history_and_a_prompt_without_output(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "2, 2", "history": [["Hi", "Ho"]], "system": "Be brief."}
    assert one(tmp_path, record) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Add\n2, 2"},
    ]


def test_prompts_as_plain_texts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(["a", "b"]))
    (tmp_path / "b.txt").write_text("a\n\nb\n")
    write(tmp_path / "c.jsonl", "a", "b")
    for name in ("a.json", "b.txt", "c.jsonl"):
        found = [conversation.messages for conversation in load(str(tmp_path / name))]
        assert found == [[{"role": "user", "content": text}] for text in "ab"], name


def test_openai_messages_keep_what_a_template_may_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": "2?"}]
    messages = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Easy."},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
        ANSWER,
    ]
    found = one(tmp_path, {"messages": messages})
    assert found == [{key: value for key, value in item.items() if value is not None} for item in messages]


def test_openai_functions_are_read_as_tools(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    found = one(tmp_path, {"messages": [USER, call, {"role": "function", "name": "add", "content": "4"}, ANSWER]})
    assert found[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert found[2]["role"] == "tool"


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("turns", [[USER, ANSWER], SHAREGPT])
def test_either_column_may_hold_either_kind_of_turns(tmp_path: Path, column: str, turns: list[Any]) -> None:
    assert one(tmp_path, {column: turns}) == [USER, ANSWER]


def test_a_prompt_beside_messages_is_no_format_of_its_own(tmp_path: Path) -> None:
    record = {"prompt": "2 + 2?", "messages": [USER, ANSWER]}
    assert one(tmp_path, record) == [USER, ANSWER]
    assert one(tmp_path, record, format="prompts") == [USER]


@pytest.mark.parametrize(
    "record",
    [
        {**BY_FORMAT["messages"], **BY_FORMAT["sharegpt"]},
        {**BY_FORMAT["messages"], **BY_FORMAT["alpaca"]},
        {**BY_FORMAT["prompts"], **BY_FORMAT["alpaca"]},
    ],
)
def test_an_ambiguous_record_names_both_formats_and_the_given_one_decides(tmp_path: Path, record: Any) -> None:
    assert faults(tmp_path, record) == ["ambiguous"]
    first, second = [name for name in BY_FORMAT if BY_FORMAT[name].items() <= record.items()]
    with pytest.raises(ProblemsError, match=rf"({first}.* and {second}|{second}.* and {first})"):
        load(write(tmp_path / "data.jsonl", record))
    for name in (first, second):
        assert one(tmp_path, record, format=name)[0] == USER


def test_a_file_of_several_formats_names_both_and_their_first_records(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", BY_FORMAT["alpaca"], BY_FORMAT["sharegpt"], BY_FORMAT["sharegpt"])
    for skip_bad in (False, True):
        with pytest.raises(ProblemsError, match=r"1 fit alpaca .*:1; 2 fit sharegpt .*:2") as error:
            load(path, skip_bad=skip_bad)
        assert kinds(error.value) == ["conversations.mixed"]
    with pytest.raises(ProblemsError, match=r"data\.format is alpaca, this record fits sharegpt") as error:
        load(path, format="alpaca")
    assert kinds(error.value) == ["conversations.format"] * 2
    assert len(load(path, format="alpaca", skip_bad=True)) == 1


def test_prompts_and_messages_may_share_a_file(tmp_path: Path) -> None:
    assert len(load(write(tmp_path / "data.jsonl", BY_FORMAT["messages"], BY_FORMAT["prompts"]))) == 2


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"messages": [{"role": "critic", "content": "x"}]}, ["role"]),
        ({"conversations": [{"from": "critic", "value": "x"}]}, ["role"]),
        ({"conversations": [{"from": None, "value": "x"}]}, ["role"]),
        ({"conversations": [{"from": "human", "value": None}]}, ["content"]),
        ({"conversations": [{"from": "human", "value": 3}]}, ["content"]),
        ({"conversations": [{"from": "human", "value": "x"}, "x"]}, ["messages"]),
        ({"conversations": []}, ["messages"]),
        ({"conversations": [{"from": "human", "value": "x"}], "system": 3}, ["content"]),
        ({"conversations": [{"from": "function_call", "value": "{add"}]}, ["call_arguments"]),
        ({"conversations": [{"from": "function_call", "value": '{"arguments": {}}'}]}, ["tool_calls"]),
        ({"instruction": 3, "output": "x"}, ["content"]),
        ({"instruction": "x", "output": ["x"]}, ["content"]),
        ({"instruction": "x", "history": [["x"]]}, ["content"]),
        ({"messages": [{"role": "user", "content": None}]}, ["content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["content_part"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["content"]),
        ({"messages": [{"role": "user", "content": ["x"]}]}, ["content_part"]),
        ({"messages": [USER, {**ANSWER, "reasoning_content": 3}]}, ["reasoning"]),
        ({"messages": [USER, {**ANSWER, "tool_calls": CALL}]}, ["tool_calls"]),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {}}]}]}, ["tool_calls"]),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, ["tool_calls"]),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "add", "arguments": "{a: 2"}}]}]},
            ["call_arguments"],
        ),
        ({"text": "x"}, ["messages"]),
        ({"messages": [{"role": "critic"}, {"role": "user"}], "tools": 3}, ["role", "content", "tools"]),
    ],
)
def test_a_bad_record_is_refused_for_every_fault(tmp_path: Path, record: Any, found: list[str]) -> None:
    assert faults(tmp_path, record) == found


def test_values_that_json_has_not_are_refused_for_every_place(tmp_path: Path) -> None:
    date = datetime.datetime(2026, 1, 1)
    record = {"messages": [{**USER, "when": [{"at": date}]}], "tools": [{"since": date}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    with pytest.raises(ProblemsError, match=r"when a value of type datetime") as error:
        load(str(tmp_path / "a.parquet"))
    assert kinds(error.value) == ["conversations.value", "conversations.tools"]


def test_a_bad_record_is_named_by_its_id_and_counted_by_its_source(tmp_path: Path) -> None:
    bad = {"id": "x7", "source": "web", "messages": [{"role": "critic", "content": "x"}]}
    path = write(tmp_path / "data.jsonl", {"source": "mine", **BY_FORMAT["messages"]}, bad, {**bad, "id": "x8"})
    with pytest.raises(ProblemsError, match=r"jsonl:2: messages\[0\] has role 'critic'.* \(id 'x7'\)"):
        load(path)
    _, dropped = load_conversations(ConversationsConfig(path=path, skip_bad=True))
    assert dropped.by_reason("web", every_source=False) == {"conversations.role": 2}
    assert dropped.sources() == {"web"}


def test_the_same_records_from_every_kind_of_file(tmp_path: Path) -> None:
    import datasets

    records = [{"id": str(number), **BY_FORMAT["sharegpt"]} for number in range(3)]
    write(tmp_path / "a.jsonl", *records)
    write(tmp_path / "lines.json", *records)
    (tmp_path / "b.json").write_text(json.dumps(records, indent=2), encoding="utf-8-sig")
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "c.parquet")
    with open(tmp_path / "d.csv", "w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["id", "conversations", "tools"])
        rows.writerows([record["id"], json.dumps(record["conversations"]), ""] for record in records)
    expected = load(str(tmp_path / "a.jsonl"))
    assert [item.id for item in expected] == ["0", "1", "2"]
    for name in ("lines.json", "b.json", "c.parquet", "d.csv"):
        assert load(str(tmp_path / name)) == expected, name
        assert len(load(str(tmp_path / name), limit=2)) == 2


def test_csv_cells_are_text_and_empty_ones_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('instruction,input,output\nSay NA,,NA\n"Two\nlines, one cell",7,x\na,b,c,d\n')
    found = load(str(path), skip_bad=True)
    assert [[message["content"] for message in item.messages] for item in found] == [
        ["Say NA", "NA"],
        ["Two\nlines, one cell\n7", "x"],
    ]
    with pytest.raises(ProblemsError, match=r"csv:row 3: has more than the 3 cells"):
        load(str(path))


def test_a_damaged_csv_file_is_one_plain_problem(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('prompt\n"Hi')
    with pytest.raises(ProblemsError) as error:
        load(str(tmp_path / "data.csv"))
    [problem] = error.value.problems
    assert problem.message.startswith("is not CSV after line 1")


def test_a_split_of_a_data_set_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", BY_FORMAT["sharegpt"])
    write(tmp_path / "test.jsonl", BY_FORMAT["sharegpt"], {"conversations": SHAREGPT[:1]})
    assert len(load(str(tmp_path), split="train")) == 1
    assert len(load(str(tmp_path), split="test")) == 2
    with pytest.raises(ProblemsError) as error:
        load(str(tmp_path), split="validation")
    assert kinds(error.value) == ["conversations.unreadable"]


@pytest.mark.parametrize("path", ["me/chats", "hf://datasets/me/chats", "hf://datasets/me/chats@abc"])
def test_a_split_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, /, **options: Any) -> list[Any]:
        asked.append((name, options["name"], options["split"], options["revision"], options["streaming"]))
        return [BY_FORMAT["messages"]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    [conversation] = load(path, split="train_sft", subset="en")
    assert conversation.messages == [USER, ANSWER]
    assert asked == [("me/chats", "en", "train_sft", "abc" if "@" in path else None, True)]


def test_a_data_set_without_a_split_is_told_so() -> None:
    with pytest.raises(ProblemsError, match=r"data\.split"):
        load("me/chats")


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_a_file_on_the_hub(tmp_path: Path, name: str) -> None:
    write(tmp_path / "data.jsonl", *BY_FORMAT.values())
    with local_hub() as hub:
        hub.commits = [{name: (tmp_path / "data.jsonl").read_bytes()}]
        found = load(f"hf://datasets/me/states/{name}", format="messages", skip_bad=True)
        assert [item.messages for item in found] == [[USER, ANSWER], [USER]]
        with pytest.raises(ProblemsError) as error:
            load(f"hf://datasets/me/states/absent{name[4:]}")
        assert kinds(error.value) == ["conversations.unreadable"]


def test_fault_11_a_name_or_folder_of_a_file_is_no_part_of_its_records(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = load(write(tmp_path / "a.jsonl", BY_FORMAT["alpaca"]))
    assert first == load(write(tmp_path / "other" / "b.jsonl", BY_FORMAT["alpaca"]))
    assert first != load(write(tmp_path / "a.jsonl", {"instruction": "x", "output": "4"}))

import json
import socket
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.config import ConversationsConfig
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.errors import ProblemsError

from .cases import kinds


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def jsonl(folder: Path, *records: Any) -> str:
    """A JSONL file; a text is written as it is."""
    path = folder / "data.jsonl"
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def talk(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    return {"id": "a", "messages": messages, **changes}


def load(path: str, **options: Any) -> list[Conversation]:
    return load_conversations(ConversationsConfig(path=path, **options))[0]


def test_records_of_regeneration_are_read_whole(tmp_path: Path) -> None:
    record = talk(source="mine", finish="stop", answer_ids=[5, 2], license="Apache-2.0")
    [conversation] = load(jsonl(tmp_path, record))
    assert conversation == Conversation("a", record["messages"], None, [5, 2], "mine")
    assert not conversation.prompt_only


def test_a_prompt_is_a_user_turn(tmp_path: Path) -> None:
    [conversation] = load(jsonl(tmp_path, {"id": 7, "prompt": "Hi"}))
    assert conversation == Conversation("7", [{"role": "user", "content": "Hi"}])
    assert conversation.prompt_only


def test_text_line_separators_and_empty_lines_do_not_split_or_count(tmp_path: Path) -> None:
    odd = "a\u2028b\x85c\rd é 🎉"
    record = talk(messages=[{"role": "user", "content": odd}])
    path = jsonl(tmp_path, "", json.dumps(record, ensure_ascii=False), "", talk(id="b"))
    first, second = load(path)
    assert first.messages[0]["content"] == odd
    assert second.id == "b"
    assert len(load(path, limit=1)) == 1


def test_fault_01_tool_turns_and_calls_are_kept_untouched(tmp_path: Path) -> None:
    """Two calls with different arguments: neither gets the other's keys."""

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "2 + 2?"},
        call("add", a=2, b=2),
        {"role": "tool", "content": "4", "name": "add"},
        call("show", text=None, nested={"x": [1]}),
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "It is 4.", "reasoning_content": "Easy."},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    plain = talk(id="b")
    conversation, _ = load(jsonl(tmp_path, {"id": "a", "messages": messages, "tools": tools}, plain))
    assert conversation.messages == messages
    assert conversation.tools == tools


def test_fault_01_an_unknown_role_is_an_error_or_a_counted_skip(tmp_path: Path) -> None:
    critic = {"role": "critic", "content": "Bad."}
    path = jsonl(tmp_path, talk(id="bad", messages=[*talk()["messages"], critic]), talk())
    with pytest.raises(ProblemsError, match=r"data.jsonl:1: messages\[2\] has role 'critic'") as error:
        load(path)
    assert kinds(error.value) == ["conversations.role"]
    conversations, dropped = load_conversations(ConversationsConfig(path=path, skip_bad=True))
    assert [conversation.id for conversation in conversations] == ["a"]
    assert dropped.by_reason() == {"conversations.role": 1}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ("{not json", "conversations.not_json"),
        ("[1, 2]", "conversations.record"),
        ({"id": "x"}, "conversations.messages"),
        ({"id": "x", "prompt": 3}, "conversations.messages"),
        (talk(messages=[]), "conversations.messages"),
        (talk(messages="Hi"), "conversations.messages"),
        (talk(messages=["Hi"]), "conversations.messages"),
        (talk(messages=[{"role": "user"}]), "conversations.content"),
        (talk(messages=[{"role": "user", "content": 3}]), "conversations.content"),
        (talk(messages=[{"role": "assistant", "content": None}]), "conversations.content"),
        (talk(messages=[{"role": "user", "content": "\ud83d"}]), "conversations.content"),
        (talk(messages=[{"role": ["user"], "content": "Hi"}]), "conversations.role"),
        (talk(messages=[{"content": "Hi"}]), "conversations.role"),
        (talk(tools="add"), "conversations.tools"),
        (talk(answer_ids=[]), "conversations.answer_ids"),
        (talk(answer_ids=[1.5]), "conversations.answer_ids"),
        (talk(answer_ids="12"), "conversations.answer_ids"),
        (talk(answer_ids=[1], messages=[{"role": "user", "content": "Hi"}]), "conversations.answer_ids"),
        (talk(id=""), "conversations.id"),
        (talk(id=["a"]), "conversations.id"),
        (talk(id="good"), "conversations.duplicate_id"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, record: Any, kind: str) -> None:
    path = jsonl(tmp_path, talk(id="good"), record)
    with pytest.raises(ProblemsError) as error:
        load(path)
    assert [(problem.kind, problem.where) for problem in error.value.problems] == [(kind, f"{path}:2")]
    assert [conversation.id for conversation in load(path, skip_bad=True)] == ["good"]


def test_every_bad_record_is_listed(tmp_path: Path) -> None:
    path = jsonl(tmp_path, "{", talk(), talk(), "7")
    with pytest.raises(ProblemsError, match="3 bad records") as error:
        load(path)
    assert [problem.where.rsplit(":", 1)[1] for problem in error.value.problems] == ["1", "3", "4"]


def test_records_without_id_get_one_from_their_content(tmp_path: Path) -> None:
    def ids(*contents: str) -> list[str]:
        records = [{"prompt": content} for content in contents]
        return [conversation.id for conversation in load(jsonl(tmp_path, *records))]

    first = ids("a", "b")
    assert len(set(first)) == 2
    assert ids("b", "a") == first[::-1]
    with pytest.raises(ProblemsError, match=r":2 too|:1 too"):
        ids("a", "a")


def test_parquet_gives_the_same_conversations(tmp_path: Path) -> None:
    import datasets

    records = [
        talk(answer_ids=[5, 2], source="mine"),
        talk(id="b", messages=[{"role": "user", "content": "Hi", "name": "Ann"}], answer_ids=None, source="yours"),
    ]
    path = tmp_path / "data.parquet"
    datasets.Dataset.from_list(records).to_parquet(path)
    assert load(str(path)) == load(jsonl(tmp_path, *records))


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "data.parquet"
    datasets.Dataset.from_list([talk(), talk(id="b", messages=[{"role": "critic", "content": "Hi"}])]).to_parquet(path)
    with pytest.raises(ProblemsError, match=r"data.parquet:row 2: messages\[0\] has role 'critic'"):
        load(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.xml").write_text("a,b")
    (tmp_path / "broken.json").write_text('[{"prompt": "Hi"},')
    (tmp_path / "broken.csv").write_text('prompt\n"Hi')
    (tmp_path / "latin.json").write_bytes('{"prompt": "Grüße"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "Grüße"}\n'.encode("latin-1"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no, it is not")
    expected = {
        "data.xml": "conversations.file_type",
        "broken.json": "conversations.unreadable",
        "broken.csv": "conversations.unreadable",
        "latin.json": "conversations.unreadable",
        "absent.jsonl": "file.missing",
        "empty.jsonl": "conversations.empty",
        "blank.jsonl": "conversations.empty",
        "latin.jsonl": "conversations.unreadable",
        "broken.parquet": "conversations.unreadable",
    }
    for name, kind in expected.items():
        with pytest.raises(ProblemsError, match=name) as error:
            load(str(tmp_path / name))
        assert kinds(error.value) == [kind], name


def test_no_server_is_asked_about_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise AssertionError("it asks a server")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([talk()]), path)
    assert load(str(path)) == load(jsonl(tmp_path, talk()))


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    assert [item.id for item in load(jsonl(tmp_path, talk(id="old")))] == ["old"]
    assert [item.id for item in load(jsonl(tmp_path, talk(id="new")))] == ["new"]


def test_json_that_python_cannot_hold_is_a_bad_record(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"id": ' + "9" * 5000 + "}", "[" * 100_000 + "]" * 100_000, talk())
    with pytest.raises(ProblemsError) as error:
        load(path)
    assert kinds(error.value) == ["conversations.not_json"] * 2
    assert len(load(path, skip_bad=True)) == 1


def test_a_line_that_is_not_utf8_is_a_bad_record_and_a_file_that_is_not_is_one_error(tmp_path: Path) -> None:
    whole = json.dumps(talk()).encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + whole + b'\n{"prompt": "\xff"}\r\n')
    with pytest.raises(ProblemsError) as error:
        load(str(path))
    assert [(item.where, item.kind) for item in error.value.problems] == [(f"{path}:2", "conversations.not_utf8")]
    assert len(load(str(path), skip_bad=True)) == 1
    path.write_bytes((whole + b"\n").decode().encode("utf-16") * 3)
    with pytest.raises(ProblemsError) as error:
        load(str(path))
    assert kinds(error.value) == ["conversations.unreadable"]


@pytest.mark.parametrize("key", ["id", "source"])
def test_half_of_a_surrogate_pair_is_refused_outside_messages_too(tmp_path: Path, key: str) -> None:
    with pytest.raises(ProblemsError) as error:
        load(jsonl(tmp_path, talk(**{key: "\ud800"})))
    assert kinds(error.value) == ["conversations.content"]


def test_full_shared_memory_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(ProblemsError) as error:
        load("me/chats", split="train")

    assert kinds(error.value) == ["disk.full"]

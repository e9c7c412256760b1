"""What a regeneration knows of conversations and answers lies on the disk, and comes back as it was."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from eagle3.data import scratch
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError
from eagle3.target import answer_file
from eagle3.target.answer_file import AnswerFile, Line
from eagle3.target.dialogue import Dialogue, Prompt
from eagle3.target.dialogue_file import DialogueFile
from tests.kills import Deadly

COUNT, LENGTH = 100, 20_000


def answer(number: int, digest: str | None = None, finish: str = "stop") -> Line:
    text = f"{number} Grüße " * (LENGTH // 8)
    return {
        "id": f"c{number}",
        "messages": [{"role": "assistant", "content": text}],
        "finish": finish,
        "prompt_digest": f"d{number}" if digest is None else digest,
        "answer_ids": [1, 2],
    }


def dialogue(number: int, turns: int = 1) -> tuple[Dialogue, Prompt]:
    messages = [{"role": role, "content": f"{number} " * (LENGTH // 4)} for role in ("user", "assistant") * turns]
    talk = Conversation(f"c{number}", messages)
    return Dialogue(talk, "all"), Prompt(Conversation(f"c{number}", messages[:1]), [number] * (number + 1))


def test_answers_stay_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    tracemalloc.start()
    with AnswerFile(path, {}) as output:
        for number in range(COUNT):
            output.append([answer(number)])
        output.finish_places([output.expect(answer(number)) for number in range(COUNT - 1, 0, -1)])
    with AnswerFile(path, {}) as output:
        assert len(output) == COUNT
        found = [output.place(f"c{number}", f"d{number}") for number in (0, 7)]
        assert all(place is not None and output.tokens(place) == 2 and output.stopped(place) for place in found)
        assert output.find("c7", "d7") == answer(7) and output.find("c7", "other") is None
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < COUNT * LENGTH / 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"c{number}" for number in range(COUNT - 1, 0, -1)]


def test_an_answer_whose_id_nobody_asks_for_is_given_once(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out.jsonl", {}) as output:
        output.append([answer(1, "same"), answer(2, "same"), answer(2, "same", "length")])
        assert len(output) == 2
    with AnswerFile(tmp_path / "out.jsonl", {}, {"c1", "new", "other"}) as output:
        assert output.find("new", "same") == {**answer(2, "same", "length"), "id": "new"}
        assert output.find("other", "same") is None and output.find("c1", "same") == answer(1, "same")
        output.finish([{**answer(2, "same"), "id": "new"}])
    spare = (tmp_path / "out.jsonl.spare.jsonl").read_text()
    assert json.loads(spare) == answer(1, "same")


@pytest.mark.parametrize("whole", ["", "{}\n", f"{'x' * 20}\n{'y' * 21}\n"])
def test_half_a_line_is_dropped_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: str) -> None:
    monkeypatch.setattr(answer_file, "_BLOCK", 7)
    path = tmp_path / "partial"
    path.write_text(f"{whole}{'z' * 50}")
    with open(path, "ab+") as file:
        assert answer_file._drop_half_line(file.fileno()) == len(whole)
    assert path.read_text() == whole


def test_an_answer_that_is_no_longer_whole_is_named(tmp_path: Path) -> None:
    lines = [answer(1), {**answer(2), "answer_tokens": "many"}]
    (tmp_path / "out.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "out.jsonl.settings.json").write_text("{}")
    with pytest.raises(ProblemsError, match=r"regenerate\.damaged.*out\.jsonl:2"):
        AnswerFile(tmp_path / "out.jsonl", {})


def test_a_kill_while_the_file_is_finished_loses_no_answer(tmp_path: Path) -> None:
    """At every call to the file system in turn; some answers go to the spare file, some come from it."""
    begun = tmp_path / "begun"
    with AnswerFile(begun / "out.jsonl", {}) as output:
        output.append([answer(1), answer(2)])
        output.finish([answer(1)])
    with AnswerFile(begun / "out.jsonl", {}) as output:
        output.append([answer(3)])
    for call in range(1, 100):
        folder = shutil.copytree(begun, tmp_path / str(call))
        if not (child := os.fork()):
            with AnswerFile(folder / "out.jsonl", {}) as output:
                Deadly(call).install()
                output.finish([answer(3), answer(2)])
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        with AnswerFile(folder / "out.jsonl", {}) as output:
            assert [output.find(f"c{number}", f"d{number}") for number in (1, 2, 3)] == [
                answer(1),
                answer(2),
                answer(3),
            ]
            output.finish([answer(3), answer(2)])
        ids = [json.loads(line)["id"] for line in (folder / "out.jsonl").read_text().splitlines()]
        assert ids == ["c3", "c2"] and len(list(folder.iterdir())) == 3
        if not ended:
            break
    assert call > 8 and ended == 0


def test_dialogues_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_BUFFER", 1 << 14)
    tracemalloc.start()
    found = DialogueFile(tmp_path, 60)
    for number in range(COUNT):
        assert found.add(*dialogue(number, 1 + number % 2)) == []
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < COUNT * LENGTH / 4 and not list(tmp_path.iterdir())
    assert list(found.asked()) == list(range(60)) and found.too_long == 60
    assert "c4" in found and "c5#3" in found and "c5" not in found and "c98" not in found
    assert found.prompt(found.first_prompt(7)) == dialogue(7)[1] and found.prompt_tokens(7) == 8
    changed = found[7]
    changed.answer("new")
    found[7] = changed
    assert found[7].left == ["c7#3"] and found[7].messages[1]["content"] == "new" and list(found.answers(7)) == [10, 11]
    (problem,) = found.add(*dialogue(4))
    assert (problem.kind, problem.where) == ("chat.duplicate_id", "c4") and "'c4'" in problem.message
    assert list(found.asked())[-1] == 59

"""A log that others write."""

from __future__ import annotations

from pathlib import Path

from eagle3.serve.wait.log_file import LogFile


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    assert log.new_lines() == [] and not log.exists(), "it need not be there yet"

    append(path, b"one\ntw")
    assert log.new_lines() == ["one"] and log.last_line() == "tw"
    append(path, b"o\r50%\r\nthree\n\n")
    assert log.new_lines() == ["two", "50%", "three"]
    assert log.new_lines() == [] and log.last_line() == ""
    log.close()


def test_a_cut_log_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    append(path, b"an old start\nhalf a li")
    assert log.new_lines() == ["an old start"]

    path.write_bytes(b"new\n")

    assert log.new_lines() == ["new"] and log.started_over == 1
    log.close()


def test_a_rotated_log_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    append(path, b"one\n")
    assert log.new_lines() == ["one"]

    path.rename(tmp_path / "log.1")
    append(tmp_path / "log.1", b"two\n")
    assert log.new_lines() == ["two"], "the new one is not there yet"
    append(tmp_path / "log.1", b"three\n")
    append(path, b"four\n")

    assert log.new_lines() == ["three", "four"] and log.started_over == 1
    log.close()


def test_bytes_that_are_no_text_and_endless_lines_are_survived(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    append(path, b"\xff\xfe\x00ok\n" + b"x" * (3 << 20))

    lines = log.new_lines()

    assert lines[0].endswith("ok") and sum(map(len, lines)) > 1 << 20
    assert len(log.last_line()) <= 1 << 20
    log.close()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    log = LogFile(path)
    log.new_lines()
    path.unlink()
    append(path, b"y\n")
    log.new_lines()
    log.close()

    assert len(list(Path("/proc/self/fd").iterdir())) == before

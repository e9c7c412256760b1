"""Progress without a terminal: lines, rates that mean something, silence where nothing is left."""

from __future__ import annotations

import pytest

from eagle3.progress import progress


def test_the_last_line_has_the_count_and_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 3, "things") as advance:
        advance(3)

    err = capsys.readouterr().err
    assert "work: 3/3 things" in err and "done" in err
    assert "left" not in err


def test_nothing_to_do_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 0, "things"):
        pass

    assert capsys.readouterr().err == ""


def test_a_stopped_block_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 3, "things") as advance:
        advance(1)

    assert "stopped" in capsys.readouterr().err


def test_a_block_that_stopped_at_once_guesses_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 3, "things"):
        pass

    err = capsys.readouterr().err
    assert "stopped" in err and "left" not in err and "nan" not in err

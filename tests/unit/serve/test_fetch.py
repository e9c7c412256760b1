"""Servers that answer too slowly, without an end, or with what cannot be read."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import httpx
import pytest

from eagle3.errors import ProblemsError
from eagle3.serve import fetch as fetch_module
from eagle3.serve.fetch import fetch, json_of
from eagle3.serve.profile.server import ProfiledServer
from eagle3.serve.wait import wait_until_ready


def client(answer: httpx.Response) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda _: answer))


def test_an_answer_without_an_end_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(httpx.ReadTimeout):
        fetch(client(httpx.Response(200, content=itertools.repeat(b" "))), "GET", "/x", 0.01)
    monkeypatch.setattr(fetch_module, "MOST_BYTES", 1000)
    with pytest.raises(httpx.ReadTimeout, match="1,001 bytes"):
        fetch(client(httpx.Response(200, content=itertools.repeat(b" "))), "GET", "/x", 60)
    assert fetch(client(httpx.Response(200, json={"a": 1})), "GET", "/x", 60).json() == {"a": 1}


def test_nesting_without_an_end_is_no_json() -> None:
    assert json_of("[" * 100_000) == "[" * 100_000
    assert json_of("[1]") == [1]


@pytest.mark.parametrize("damage", ["gzip", "deep"])
def test_what_cannot_be_read_is_one_problem(damage: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if damage == "deep":
            return httpx.Response(200, content=b"[" * 100_000)
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"abc"))

    transport = httpx.MockTransport(answer)
    with pytest.raises(ProblemsError, match=r"start\.(timeout|not_sglang)"):
        wait_until_ready("http://server", timeout=0, poll_seconds=0.01, transport=transport)
    with ProfiledServer("http://server", transport=transport) as server, pytest.raises(ProblemsError, match="server"):
        server.facts()


def test_meta_info_of_another_type_is_no_answer() -> None:
    pieces = "".join(f"data: {json.dumps({'meta_info': value})}\n\n" for value in ([1], "x", {"completion_tokens": -1}))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=pieces))
    with (
        ProfiledServer("http://server", transport=transport) as server,
        pytest.raises(ProblemsError, match=r"server\.no_answer"),
    ):
        server.answer([1], 4)


def test_what_the_server_answers_while_it_starts_is_shown_without_its_log() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(302))
    with pytest.raises(ProblemsError, match="/ready answers 302"):
        wait_until_ready("http://server", timeout=0, poll_seconds=0.01, transport=transport)


def test_a_log_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProblemsError, match=r"start\.log.*pipe"):
        wait_until_ready(None, log=tmp_path / "pipe", timeout=1, poll_seconds=0.01)

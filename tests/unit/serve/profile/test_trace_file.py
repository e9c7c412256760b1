"""Reading a trace: whatever is in the file, one clear error or all of its events."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.profile import trace_file
from eagle3.serve.profile.trace import read_trace, read_traces
from eagle3.serve.profile.trace_file import TraceFile

from .cases import TraceBuilder


def built(count: int = 3) -> TraceBuilder:
    builder = TraceBuilder()
    builder.cycles(count)
    return builder


def kinds(call: object, *arguments: object) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        call(*arguments)  # type: ignore[operator]
    return [problem.kind for problem in error.value.problems]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "gz without the suffix.json"])
def test_all_events_and_facts_are_read_however_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, name: str
) -> None:
    monkeypatch.setattr(trace_file, "_BYTES", chunk)
    builder = built(1)
    builder.facts.update({"é": 'ü\\"', "number": 12345, "list": [1, {"a": []}], "traceEventsCount": 3})
    builder.x("kernel", 'naïve <int, 3> [with "quotes"] ]}', 0, 1)
    path = builder.write(tmp_path / name)
    if name.startswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    file = TraceFile(path)

    assert list(file) == builder.events
    assert file.facts == {**builder.facts, "traceName": "x"}


def test_indented_and_with_control_characters_in_names(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = json.dumps(built().value(), indent=2).replace("draft_gemm", "draft\tge\x01mm")
    path.write_text(text, encoding="utf-8")

    assert len(list(TraceFile(path))) == len(built().events)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_anywhere_is_called_truncated(tmp_path: Path, packed: bool) -> None:
    text = json.dumps(built(1).value()).encode()
    data = gzip.compress(text) if packed else text
    path = tmp_path / ("x.json.gz" if packed else "x.json")
    for length in [*range(len(data) // 3, len(data) // 3 + 60), len(data) * 9 // 10, len(data) - 2, len(data) - 1]:
        path.write_bytes(data[:length])
        assert kinds(read_trace, path) == ["trace.truncated"], length


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "trace.format"),
        (b"\x7fELF", "trace.format"),
        (b"[1, 2]", "trace.format"),
        (b"{}", "trace.format"),
        (b'{"a": 1}', "trace.format"),
        (b'{"traceEvents": {"a": 1}}', "trace.format"),
        (b'{"traceEvents": [1, 2]}', "trace.format"),
        (b'{"traceEvents": [{"a": 1}, {"b": nonsense of some length, "c": 2}], "d": 123456}', "trace.damaged"),
        (b'{"traceEvents": [{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "trace.damaged"),
        (b'{"traceEvents": [{"a": ' + b"9" * 10_000 + b"}]}", "trace.damaged"),
        (b"{3: 4, 5: 6, 7: 8, 9: 10}", "trace.damaged"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03nonsense that is no deflate stream", "trace.damaged"),
        (b'{"traceEvents": []}', "trace.nothing"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}', "trace.nothing"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, data: bytes, kind: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    assert kinds(read_trace, path) == [kind]


def test_no_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert kinds(read_trace, tmp_path / "none.json") == ["file.missing"]
    assert kinds(read_trace, tmp_path) == ["file.missing"]


@pytest.mark.parametrize("value", ["1e400", "NaN", "-Infinity", '"12"', "null", "true", "1e17", "9" * 400])
def test_numbers_that_cannot_be_are_named_each(tmp_path: Path, value: str) -> None:
    builder = built()
    for place in (20, 30):
        builder.events[place]["ts"] = "HERE"
    path = tmp_path / "x.json"
    path.write_text(json.dumps(builder.value()).replace('"HERE"', value), encoding="utf-8")
    with pytest.raises(ProblemsError, match=r"event 21 .*ts is") as error:
        read_trace(path)
    assert [problem.kind for problem in error.value.problems] == ["trace.value"] * 2


def test_a_negative_length_is_named_and_a_missing_one_is_zero(tmp_path: Path) -> None:
    builder = built()
    kernel = next(event for event in builder.events if event.get("cat") == "kernel")
    kernel["dur"] = -1
    assert kinds(read_trace, builder.write(tmp_path / "x.json")) == ["trace.value"]
    del kernel["dur"]
    assert read_trace(builder.write(tmp_path / "x.json")).work[0].end == builder.origin


def test_ranks_come_from_the_names_or_from_inside_and_must_differ(tmp_path: Path) -> None:
    paths = [built().write(tmp_path / f"x-TP-{rank}.trace.json.gz") for rank in (10, 2)]
    assert [trace.rank for trace in read_traces(paths)] == [2, 10]
    inside = built()
    inside.facts["distributedInfo"] = {"rank": 5}
    assert read_trace(inside.write(tmp_path / "y.json")).rank == 5

    (tmp_path / "b").mkdir()
    again = built().write(tmp_path / "b/z-TP-2.json")
    nameless = built().write(tmp_path / "z.json")
    assert kinds(read_traces, [*paths, again, nameless]) == ["trace.ranks"] * 2
    assert kinds(read_traces, [tmp_path / "none", paths[0], tmp_path / "none either"]) == ["file.missing"] * 2


def test_a_merged_trace_is_refused(tmp_path: Path) -> None:
    builder = built()
    for event in builder.events:
        event["pid"] = f"[TP00] {event['pid']}"
    assert kinds(read_trace, builder.write(tmp_path / "merged.json")) == ["trace.merged"]


def test_memory_does_not_follow_the_files_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_BYTES", 1 << 16)
    builder = built()
    for place in range(6_000):
        builder.x("cpu_op", "aten::mm", place, 1, shapes="x" * 300)
    path = builder.write(tmp_path / "x.json.gz")
    size = len(gzip.decompress(path.read_bytes()))
    del builder

    tracemalloc.start()
    trace = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert trace.events > 6_000 and size > 2_000_000
    assert peak < size / 4

"""Deep verification: in parallel, resumable, every problem by shard and sample."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3.data import store_verify
from eagle3.data.store import verify
from eagle3.errors import Problem, ProblemsError
from tests.stores import rewrite_manifest

from .cases import contract, kinds, make_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of s0, s1 | s2, s3 | s4, s5."""
    return make_store(tmp_path / "store")


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_read(folder: Path, monkeypatch: pytest.MonkeyPatch, record: Path) -> tuple[list[str], list[Problem]]:
    """Names of the files that a resumed verification reads, and what it finds."""
    read: list[str] = []
    real = store_verify.check_file

    def reading(folder, file, *more):  # type: ignore[no-untyped-def]
        read.append(file.file)
        return real(folder, file, *more)

    with monkeypatch.context() as patch:
        patch.setattr(store_verify, "check_file", reading)
        problems = verify(folder, deep=True, resume=record)
    return sorted(read), problems


@pytest.mark.parametrize("workers", [1, 3])
def test_every_bad_file_is_named_in_the_stores_order_however_many_read(folder: Path, workers: int) -> None:
    flip(folder / "target_head.safetensors", -1 + 8 * (folder / "target_head.safetensors").stat().st_size)
    flip(shard(folder, 0), 8 * shard(folder, 0).stat().st_size - 1)  # the last sample's loss mask becomes 129
    shard(folder, 1).write_bytes(shard(folder, 1).read_bytes()[:-1])
    flip(shard(folder, 2), 8 * shard(folder, 2).stat().st_size - 1)
    found = [(problem.kind, Path(problem.where).name) for problem in verify(folder, deep=True, workers=workers)]
    assert found == [
        ("store.shard_truncated", shard(folder, 1).name),
        ("store.checksum", "target_head.safetensors"),
        ("store.checksum", shard(folder, 0).name),
        ("store.loss_mask", shard(folder, 0).name),
        ("store.checksum", shard(folder, 2).name),
        ("store.loss_mask", shard(folder, 2).name),
    ]


def test_fault_07_any_flipped_bit_is_found_with_the_samples_named(folder: Path) -> None:
    path = shard(folder, 1)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 61):
        flip(path, bit)
        problems = verify(folder, deep=True)
        assert problems and {problem.where for problem in problems} == {str(path)}, bit
        assert all("s2" in problem.message or "s3" in problem.message for problem in problems), problems
        path.write_bytes(whole)
    assert verify(folder, deep=True) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_value_that_is_not_finite_is_seen_anywhere(dtype: torch.dtype, shape: tuple[int, int], value: float) -> None:
    states = torch.randn(shape).to(dtype)
    assert store_verify._finite(states)
    for place in range(0, states.numel(), max(1, states.numel() // 40)):
        wrong = states.clone()
        wrong.view(-1)[place] = value
        assert not store_verify._finite(wrong)


def test_a_disk_that_fails_is_named_and_the_rest_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store_verify.sha256_file

    def failing(path: Path) -> str:
        if path == shard(folder, 1):
            raise OSError(5, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(store_verify, "sha256_file", failing)
    flip(shard(folder, 2), 8 * shard(folder, 2).stat().st_size - 1)
    problems = verify(folder, deep=True)
    assert [problem.kind for problem in problems] == ["store.unreadable", "store.checksum", "store.loss_mask"]
    assert problems[0].where == str(shard(folder, 1)) and "s2, s3" in problems[0].message


def test_a_shard_that_vanishes_meanwhile_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store_verify.check_store

    def vanishing(*args):  # type: ignore[no-untyped-def]
        found = real(*args)
        shard(folder, 0).unlink()
        return found

    monkeypatch.setattr(store_verify, "check_store", vanishing)
    [problem] = verify(folder, deep=True)
    assert (problem.kind, problem.where) == ("store.unreadable", str(shard(folder, 0)))


def test_a_killed_verification_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, record = make_store(tmp_path / "store", samples=12), tmp_path / "record"
    script = (
        "import sys, time; from pathlib import Path; from eagle3.data import store_verify\n"
        "real = store_verify.check_file\n"
        "def slow(folder, file, *more):\n"
        "    if file.file == 'shard-00003.safetensors': print('there', flush=True); time.sleep(600)\n"
        "    return real(folder, file, *more)\n"
        "store_verify.check_file = slow\n"
        "store_verify.verify(Path(sys.argv[1]), True, workers=1, resume=Path(sys.argv[2]))"
    )
    with subprocess.Popen([sys.executable, "-c", script, folder, record], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        deadline = time.monotonic() + 60
        while record.read_text().count("\n") < 5:  # the first line, the head and three shards
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with record.open("a") as handle:
        handle.write('["shard-00003.safetensors", 1')  # a line that a kill cut
    with pytest.MonkeyPatch.context() as monkeypatch:
        read, problems = files_read(folder, monkeypatch, record)
    assert (read, problems) == ([f"shard-0000{number}.safetensors" for number in (3, 4, 5)], [])
    assert not record.exists(), "a verification that is done leaves nothing that would hide later damage"


def test_what_was_bad_or_has_changed_since_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = folder.parent / "record"
    whole = shard(folder, 0).read_bytes()
    flip(shard(folder, 0), 8 * len(whole) - 1)
    assert len(files_read(folder, monkeypatch, record)[0]) == 4
    read, problems = files_read(folder, monkeypatch, record)
    assert read == [shard(folder, 0).name] and len(problems) == 2
    status = shard(folder, 2).stat()
    os.utime(shard(folder, 2), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    read, _ = files_read(folder, monkeypatch, record)
    assert read == [shard(folder, 0).name, shard(folder, 2).name]
    shard(folder, 0).write_bytes(whole)
    assert files_read(folder, monkeypatch, record) == ([shard(folder, 0).name], [])


def test_a_shard_of_which_the_manifest_says_something_else_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_store(tmp_path / "all", last_rows="all")
    record, manifest = folder.parent / "record", folder / "manifest.json"
    flip(shard(folder, 0), 8 * shard(folder, 0).stat().st_size - 1)
    files_read(folder, monkeypatch, record)
    said = '"id": "s4",\n          "supervised": 2'
    assert said in manifest.read_text()
    rewrite_manifest(manifest, json.loads(manifest.read_text().replace(said, said.replace("2", "3"))))
    read, problems = files_read(folder, monkeypatch, record)
    assert read == [shard(folder, 0).name, shard(folder, 2).name]
    assert "'s4' has 2 supervised tokens, the manifest says 3" in problems[-1].message


def test_another_store_shares_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_store(tmp_path / "first"), make_store(tmp_path / "second")
    for folder in (first, second):
        flip(shard(folder, 0), 8 * shard(folder, 0).stat().st_size - 1)
        assert len(files_read(folder, monkeypatch, tmp_path / "record")[0]) == 4


def test_a_record_inside_the_store_or_of_something_else_is_refused(folder: Path) -> None:
    thesis = folder.parent / "thesis.txt"
    thesis.write_text("mine\n")
    for path, kind in ((folder / "record", "verify.inside_store"), (thesis, "verify.other_file")):
        with pytest.raises(ProblemsError) as error:
            verify(folder, deep=True, resume=path)
        assert kinds(error.value) == [kind]
    assert thesis.read_text() == "mine\n" and not (folder / "record").exists()


@pytest.mark.parametrize(
    ("tensor", "raw", "kind", "said"),
    [
        ("aux_scales", struct.pack("<f", 3.0), "store.scale", "has numbers in its aux_scales"),
        ("last_scales", struct.pack("<f", 0.0), "store.scale", "has numbers in its last_scales"),
        ("aux_hidden_states", b"\x7f", "store.non_finite", "has NaN or infinity in its aux_hidden_states"),
        ("last_hidden_states", b"\xff", "store.non_finite", "has NaN or infinity in its last_hidden_states"),
    ],
)
def test_wrong_numbers_of_an_fp8_store_are_named(tmp_path: Path, tensor: str, raw: bytes, kind: str, said: str) -> None:
    folder = make_store(tmp_path / "fp8", contract=contract(dtype="float8_e4m3fn"))
    path = shard(folder, 1)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    place = start + json.loads(data[8:start])[tensor]["data_offsets"][0]
    data[place : place + len(raw)] = raw
    path.write_bytes(data)
    problems = verify(folder, deep=True)
    assert [problem.kind for problem in problems] == ["store.checksum", kind]
    assert f"'s2' {said}" in problems[1].message

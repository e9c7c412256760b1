"""Writers that are killed at random moments, and disks that fail at random: a few hundred times.

After each, a reader opens the store and finds right values only, or refuses it; nothing that was finished is lost; and
a writer that goes on completes a store that is equal to an undisturbed one, byte for byte.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.cli import main
from eagle3.data.store import StoredSample, StoreReader, verify
from eagle3.data.store_format import load_manifest, shard_name
from eagle3.errors import ProblemsError
from eagle3.target.tiny import make_tiny_llama
from tests.children import compute_alone
from tests.unit.data.cases import sample, write_missing, writer
from tests.unit.data.joint_cases import content, joint, write
from tests.unit.target.cases import extract_config, write_conversations

ROOT = Path(__file__).parents[2]
SAMPLES = 10
KILLS = 50
ERRORS = 30
JOINT_KILLS = 20
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
UNFINISHED = {"file.missing", "store.empty", "store.shard_unlisted", "store.shard_missing", "fingerprint.missing"}
"""Why a reader may refuse what a writer left. Never a wrong value, length or checksum."""

Done = Callable[[int], None]
"""Notes that this shard is finished: its writer was told so."""


def write_alone(folder: Path, done: Done) -> None:
    with writer(folder) as store:
        for number in range(2, SAMPLES + 1, 2):
            write_missing(store, number)
            done(number // 2 - 1)


def write_jointly(index: int) -> Callable[[Path, Done], None]:
    """What one of two processes does."""

    def work(folder: Path, done: Done) -> None:
        with joint(folder, index, 2) as store:
            for number in range(index, SAMPLES // 2, 2):
                if shard_name(number) not in {shard.file for shard in store.manifest().shards}:
                    write(store, number)
                done(number)

    return work


class Child:
    """A process that writes, in a folder that others may have begun.

    Exit codes: 0 all is written, 2 a problem was named.
    """

    def __init__(self, work: Callable[[Path, Done], None], folder: Path, before: Callable[[], None] = lambda: None):
        self._finished = folder.parent / f"{folder.name}.finished"
        ready, begun = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            code = 3
            try:
                os.close(ready)
                compute_alone()
                log = os.open(self._finished, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(begun, b"!")
                # A killed process, unlike a machine, loses no page. The pause makes the work long enough to be hit.
                os.fsync = lambda descriptor: time.sleep(0.002)
                before()
                work(folder, lambda number: os.write(log, f"{number}\n".encode()) and None)
                code = 0
            except ProblemsError as error:
                code = 2 if all(problem.kind.startswith("disk.") for problem in error.problems) else 3
            finally:
                os._exit(code)
        os.close(begun)
        os.read(ready, 1)
        os.close(ready)

    def kill_after(self, seconds: float) -> bool:
        """Whether it was still at work."""
        time.sleep(seconds)
        os.kill(self.process, signal.SIGKILL)
        status = os.waitpid(self.process, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status != 0

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def finished(folder: Path) -> set[str]:
    """Names of the shards that a writer, alive or dead, was told are finished."""
    log = folder.parent / f"{folder.name}.finished"
    return {shard_name(int(line)) for line in log.read_text().splitlines()} if log.exists() else set()


def expected(number: int) -> StoredSample:
    return sample(f"s{number}", tokens=3 + number, start=number)


def assert_right_or_refused(folder: Path) -> str:
    """What a reader finds; asserts that nothing is wrong with it, and that all finished shards are there."""
    if lost := finished(folder):
        listed = {shard.file: shard for shard in load_manifest(folder).shards}
        assert lost <= listed.keys()
        assert all((folder / name).stat().st_size == listed[name].bytes for name in lost)
    try:
        reader = StoreReader(folder)
    except ProblemsError as error:
        kinds = {problem.kind for problem in error.problems}
        assert kinds <= UNFINISHED, error
        return "refused"
    assert verify(folder, deep=True, workers=1) == []
    for index, info in enumerate(reader.samples):
        read, right = reader.read(index), expected(int(info.id[1:]))
        assert torch.equal(read.input_ids, right.input_ids.int()) and torch.equal(read.loss_mask, right.loss_mask)
        assert torch.equal(read.aux_hidden_states, right.aux_hidden_states)
        assert torch.equal(read.last_hidden_states, right.supervised_last)
        assert read.target_argmax is not None and torch.equal(read.target_argmax, right.supervised_argmax.int())
    return "opened"


def kept(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each finished shard: one that is written again is lost work."""
    return {name: ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in finished(folder)}


def whole_store(folder: Path) -> dict[str, bytes]:
    write_alone(folder, lambda number: None)
    return dict(content(folder))


class Delays:
    """Random times that a writer gets before it is killed.

    Longer after each kill and shorter after each writer that came to its end: five of six are met at work, on a machine
    of any speed that changes at any time.
    """

    def __init__(self, seed: int) -> None:
        self._chance, self._longest = random.Random(seed), 0.1

    def kill(self, child: Child) -> bool:
        """Whether it was still at work."""
        killed = child.kill_after(self._chance.uniform(0, self._longest))
        self._longest *= 1.05 if killed else 0.8
        return killed


def test_fault_08_writers_killed_at_random_moments(tmp_path: Path) -> None:
    delays, whole = Delays(8), whole_store(tmp_path / "whole")
    seen: Counter[str] = Counter()
    for number in count():
        folder, killed = tmp_path / f"store{number}", True
        while killed:
            before = kept(folder)
            killed = delays.kill(Child(write_alone, folder))
            seen["killed"] += killed
            seen[assert_right_or_refused(folder)] += killed
            assert before.items() <= kept(folder).items(), "finished work was done again"
        assert content(folder) == whole
        if seen["killed"] >= KILLS:
            break
    assert seen["opened"] > KILLS // 10 and seen["refused"] > KILLS // 10, f"kills came at one moment only: {seen}"


def test_fault_08_processes_that_write_together_killed_at_random_moments(tmp_path: Path) -> None:
    for index in (0, 1):
        write_jointly(index)(tmp_path / "whole", lambda number: None)
    delays, whole, kills = Delays(9), content(tmp_path / "whole"), 0
    for number in count():
        folder, running = tmp_path / f"store{number}", {0, 1}
        while running:
            before = kept(folder)
            children = {index: Child(write_jointly(index), folder) for index in running}
            ended = {index for index, child in children.items() if not delays.kill(child)}
            kills += len(running - ended)
            running -= ended
            assert_right_or_refused(folder)
            assert before.items() <= kept(folder).items(), "finished work was done again"
        assert content(folder) == whole
        if kills >= JOINT_KILLS:
            break


class FailingDisk:
    """Fails at the `fatal`-th write, sync, rename or reservation of a process; and, if it stays full, ever after."""

    def __init__(self, fatal: int, code: int, stays: bool) -> None:
        self._fatal, self._code, self._stays = fatal, code, stays
        self._calls = 0

    def install(self) -> None:
        """In this process, for good."""
        for name in ("fsync", "replace", "posix_fallocate"):
            setattr(os, name, self._failing(getattr(os, name)))
        real = io.open
        io.open = builtins.open = lambda *args, **kwargs: _File(real(*args, **kwargs), self)  # type: ignore[assignment]

    def call(self) -> None:
        self._calls += 1
        if self._calls == self._fatal or (self._stays and self._calls > self._fatal):
            raise OSError(self._code, os.strerror(self._code))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.call()
            return function(*args, **kwargs)

        return failing


class _File:
    """A file whose writes may end half-way."""

    def __init__(self, handle: Any, disk: FailingDisk) -> None:
        self._handle, self._disk = handle, disk

    def write(self, data: Any) -> int:
        try:
            self._disk.call()
        except OSError:
            self._handle.write(data[: len(data) // 2])
            raise
        return self._handle.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@pytest.mark.parametrize("together", [False, True])
def test_fault_08_disks_that_fail_at_random(tmp_path: Path, together: bool) -> None:
    chance, whole = random.Random(10), whole_store(tmp_path / "whole")
    works = (write_jointly(0), write_jointly(1)) if together else (write_alone,)
    if together:
        for work in works:
            work(tmp_path / "joint", lambda number: None)
        whole = dict(content(tmp_path / "joint"))
    seen: Counter[int] = Counter()
    for number in count():
        folder = tmp_path / f"store{number}"
        for work in works:
            code = 2
            while code == 2:
                disk = FailingDisk(chance.randint(1, 90), chance.choice(ERRNOS), chance.random() < 0.5)
                before = kept(folder)
                code = Child(work, folder, disk.install).wait()
                seen[code] += 1
                assert code in (0, 2), "the error has no name"
                assert together or not list(folder.glob("*.tmp")), "an error leaves nothing half-written"
                assert_right_or_refused(folder)
                assert before.items() <= kept(folder).items(), "finished work was done again"
        assert content(folder) == whole
        if seen[2] >= ERRORS:
            break


FULL_DISK = """
import errno, os, sys
from eagle3.cli import main

real = os.replace

def full(source, place):
    if str(place).endswith(sys.argv[1]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(source, place)

os.replace = full
main(sys.argv[2:])
"""


def test_fault_08_extraction_on_a_full_disk_says_so_and_a_rerun_finishes(tmp_path: Path) -> None:
    data, target = write_conversations(tmp_path / "data.jsonl", 10), make_tiny_llama(tmp_path / "target")
    cfg = extract_config(target, data, tmp_path / "store", output_indices=[1, 2], shard_max_samples=2)
    (tmp_path / "extract.json").write_text(json.dumps(cfg.model_dump(mode="json")))  # JSON is YAML
    extract, folder = ["extract", "--config", str(tmp_path / "extract.json")], Path(cfg.output)

    # A process of its own, not a fork: torch's threads do not live on in one.
    command = [sys.executable, "-c", FULL_DISK, shard_name(2), *extract]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode == 2
    assert "[disk.full]" in ended.stderr and shard_name(2) in ended.stderr and "Traceback" not in ended.stderr
    assert [shard.file for shard in load_manifest(folder).shards] == [shard_name(0), shard_name(1)]
    assert len(StoreReader(folder, allow_incomplete=True)) == 4
    with pytest.raises(SystemExit) as stop:
        main(extract)
    assert not stop.value.code and len(StoreReader(folder)) == 10 and verify(folder, deep=True) == []


def test_fault_07_a_folder_copied_half_way_is_refused_and_names_what_is_missing(tmp_path: Path) -> None:
    chance, source = random.Random(7), tmp_path / "whole"
    whole = whole_store(source)
    for number in range(60):
        folder = tmp_path / f"copy{number}"
        folder.mkdir()
        names = sorted(whole)
        chance.shuffle(names)
        copied = chance.randrange(len(names))
        for name in names[:copied]:
            shutil.copy(source / name, folder / name)
        cut = names[copied]
        (folder / cut).write_bytes(whole[cut][: chance.randrange(len(whole[cut]))])
        with pytest.raises(ProblemsError) as error:
            StoreReader(folder)
        places = " ".join(problem.where for problem in error.value.problems)
        missing = names[copied:] if "manifest.json" in names[:copied] else ["manifest.json"]
        assert all(name in places for name in missing), error.value


def test_fault_07_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """Shards and head have checksums, the manifest its seal."""
    chance, folder = random.Random(6), tmp_path / "store"
    whole = whole_store(folder)
    for name in sorted(whole):
        for bit in sorted(chance.sample(range(8 * len(whole[name])), 120)):
            data = bytearray(whole[name])
            data[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(data)
            problems = verify(folder, deep=True, workers=1)
            assert name in " ".join(problem.where for problem in problems), (name, bit)
        (folder / name).write_bytes(whole[name])

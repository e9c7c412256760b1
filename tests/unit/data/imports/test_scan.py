"""Everything that bars a sample from a store, each as a problem of its own; all bad files are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data.imports.folder import find_dump
from eagle3.data.imports.masks import open_masks
from eagle3.data.imports.sample import Expected
from eagle3.data.imports.scan import Scan, scan_dump
from tests.dumps import DumpSample, random_dump_sample, write_modelopt, write_specforge

EXPECTED = Expected(num_aux=2, hidden_size=16, vocab_size=32, context_length=64, non_text_ids=frozenset({31}))
GOOD = replace(random_dump_sample(), ids=torch.arange(12))


def scan(folder: Path, expected: Expected = EXPECTED, store_dtype: torch.dtype | None = None) -> Scan:
    return scan_dump(find_dump(folder), open_masks("file"), expected, store_dtype, workers=2)


def with_value(states: torch.Tensor, value: float) -> torch.Tensor:
    changed = states.clone()
    changed[7, 3] = value
    return changed


def with_id(sample: DumpSample, token: int) -> DumpSample:
    return replace(sample, ids=torch.where(torch.arange(12) == 5, token, sample.ids))


FAULTS: dict[str, tuple[Callable[[DumpSample], DumpSample], str]] = {
    "batch of 2": (lambda s: replace(s, last=s.last.expand(2, 12, 16)), "import.shape"),
    "ids of 2 dimensions": (lambda s: replace(s, ids=s.ids.expand(2, 12)), "import.shape"),
    "no tokens": (lambda s: s.cut(ids=0, mask=0, aux=0, last=0), "import.shape"),
    "mask of 2 dimensions": (lambda s: replace(s, mask=s.mask.expand(2, 12)), "import.shape"),
    "ids too short": (lambda s: s.cut(ids=11), "import.length"),
    "mask too short": (lambda s: s.cut(mask=11), "import.length"),
    "aux too short": (lambda s: s.cut(aux=11), "import.length"),
    "last too short": (lambda s: s.cut(last=11), "import.length"),
    "one layer less": (lambda s: replace(s, aux=s.aux[:1]), "import.width"),
    "one layer more": (lambda s: replace(s, aux=[*s.aux, s.last]), "import.width"),
    "last of another width": (lambda s: replace(s, last=s.last[:, :8]), "import.width"),
    "ids of floats": (lambda s: replace(s, ids=s.ids.float()), "import.dtype"),
    "states of integers": (lambda s: replace(s, last=s.last.int()), "import.dtype"),
    "states of fp8": (lambda s: replace(s, last=s.last.to(torch.float8_e4m3fn)), "import.dtype"),
    "states of two types": (lambda s: replace(s, last=s.last.float()), "import.dtype"),
    "NaN": (lambda s: replace(s, aux=[with_value(s.aux[0], float("nan")), s.aux[1]]), "import.non_finite"),
    "infinity": (lambda s: replace(s, last=with_value(s.last, float("inf"))), "import.non_finite"),
    "an id too large": (lambda s: with_id(s, 32), "import.vocabulary"),
    "a negative id": (lambda s: with_id(s, -100), "import.vocabulary"),
    "a picture": (lambda s: with_id(s, 31), "import.not_text"),
    "a mask of other values": (lambda s: replace(s, mask=s.mask * 2), "import.loss_mask"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    change, kind = FAULTS[name]
    write_modelopt(tmp_path, [GOOD, change(GOOD), GOOD])

    result = scan(tmp_path)

    assert [problem.kind for problem in result.problems] == [kind]
    assert result.problems[0].where == str(tmp_path / "conversation-1.pt")
    assert [sample.name for sample in result.found] == ["conversation-0.pt", "conversation-2.pt"]
    assert result.left_out == {kind: 1}


def test_a_sample_longer_than_the_context_is_named(tmp_path: Path) -> None:
    write_specforge(tmp_path, [GOOD])

    assert scan(tmp_path, replace(EXPECTED, context_length=11)).left_out == {"import.too_long": 1}
    assert scan(tmp_path, replace(EXPECTED, context_length=12)).left_out == {}


def test_every_bad_file_is_listed_and_counted(tmp_path: Path) -> None:
    changes = [change for change, _ in FAULTS.values()]
    write_modelopt(tmp_path, [GOOD, *(change(GOOD) for change in changes)])
    (tmp_path / "conversation-3.pt").write_bytes(b"no archive")

    result = scan(tmp_path)

    assert {problem.where for problem in result.problems} == {
        str(tmp_path / f"conversation-{number + 1}.pt") for number in range(len(changes))
    }
    assert result.left_out.total() == len(changes)
    assert len(result.found) == 1


def test_all_faults_of_a_file_are_listed(tmp_path: Path) -> None:
    write_modelopt(tmp_path, [replace(GOOD, aux=GOOD.aux[:1], last=GOOD.last[:, :8], ids=GOOD.ids.float())])

    assert [problem.kind for problem in scan(tmp_path).problems] == ["import.width", "import.width", "import.dtype"]


def test_values_that_the_stores_type_cannot_hold_are_named(tmp_path: Path) -> None:
    write_modelopt(tmp_path, [replace(GOOD, last=with_value(GOOD.last, 1e6))])

    assert scan(tmp_path, store_dtype=torch.bfloat16).left_out == {}
    assert scan(tmp_path, store_dtype=torch.float16).left_out == {"import.non_finite": 1}


def test_what_is_kept_of_a_sample_tells_tokens_and_masks_apart(tmp_path: Path) -> None:
    same = scan(write_modelopt(tmp_path / "a", [GOOD])).digest
    assert scan(write_modelopt(tmp_path / "b", [replace(GOOD, last=GOOD.last * 2)])).digest == same
    assert scan(write_modelopt(tmp_path / "c", [with_id(GOOD, 30)])).digest != same
    assert scan(write_modelopt(tmp_path / "d", [replace(GOOD, mask=1 - GOOD.mask)])).digest != same


def test_states_of_known_samples_are_not_read_again(tmp_path: Path) -> None:
    write_modelopt(tmp_path, [replace(GOOD, last=with_value(GOOD.last, float("nan")))])
    dump, masks = find_dump(tmp_path), open_masks("file")

    assert scan_dump(dump, masks, EXPECTED, is_known=lambda name: name == "conversation-0.pt").left_out == {}
    assert scan_dump(dump, masks, EXPECTED, is_known=lambda name: False).left_out == {"import.non_finite": 1}


def test_links_that_lead_nowhere_are_named_with_all_other_bad_files(tmp_path: Path) -> None:
    write_modelopt(tmp_path, [GOOD])
    [good] = tmp_path.iterdir()
    good.rename(tmp_path / "good.pt")
    (tmp_path / "a_link.pt").symlink_to(tmp_path / "nowhere.pt")
    (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:700])
    found = scan(tmp_path)
    assert [(Path(problem.where).name, problem.kind) for problem in found.problems] == [
        ("a_link.pt", "file.missing"),
        ("cut.pt", "import.damaged"),
        ("empty.pt", "import.damaged"),
        ("loop.pt", "file.unreadable"),
    ]
    assert [item.name for item in found.found] == ["good.pt"]

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from eagle3.errors import ProblemsError
from eagle3.wiring.safetensors_header import TensorInfo, read_header, read_int_tensor

GOOD = {"a": torch.arange(6, dtype=torch.int64).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def refused(path: Path) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        read_header(path)
    return [problem.kind for problem in caught.value.problems]


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(GOOD, path, metadata={"format": "pt"})

    header = read_header(path)

    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "a": ("I64", (2, 3)),
        "b": ("BF16", (4,)),
    }
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == path.stat().st_size
    assert header.data_start + max(info.end for info in header.tensors.values()) == header.file_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([-(2**63), -1, 0, 2**63 - 1]),
        torch.tensor([-(2**31), 7], dtype=torch.int32),
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.zeros(0, dtype=torch.int64),
    ],
)
def test_reads_integers_as_torch_does(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"first": torch.ones(3), "x": tensor}, path)

    assert read_int_tensor(path, "x") == tensor.to(torch.int64).tolist()


@pytest.mark.parametrize(("code", "size"), [(code, size) for size, codes in {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2", 2: "I16 U16 F16 BF16", 4: "I32 U32 F32", 8: "I64 U64 F64",
}.items() for code in codes.split()])  # fmt: skip
def test_every_type_of_the_format_is_known_by_its_size(tmp_path: Path, code: str, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"x": {"dtype": code, "shape": [3], "data_offsets": [0, 3 * size]}}) + bytes(3 * size))

    assert read_header(path).tensors["x"].dtype == code


def test_a_float_or_absent_tensor_is_not_read_as_integers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(GOOD, path)

    with pytest.raises(ProblemsError, match=r"safetensors\.not_integer"):
        read_int_tensor(path, "b")
    with pytest.raises(ProblemsError, match=r"safetensors\.no_tensor"):
        read_int_tensor(path, "c")


def test_fault_7_cut_bytes_and_extra_bytes_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    whole = save(GOOD)
    path.write_bytes(whole[:-1])
    assert refused(path) == ["safetensors.truncated"]
    path.write_bytes(whole + b"\0")
    assert refused(path) == ["safetensors.too_long"]


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def message(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(ProblemsError) as caught:
            read_header(path)
        return caught.value.problems[0].message

    assert message((100).to_bytes(8, "little") + b"{}") == ("ends inside its header: 10 bytes, expected at least 108")
    whole = save(GOOD)
    assert message(whole[:-3]) == f"has {len(whole) - 3} bytes, its header accounts for {len(whole)}"
    assert message(b"nonsense, twice") == "is not a safetensors file: 15 bytes that start with b'nonsense'"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(cut=st.integers(1, len(save(GOOD)) - 1))
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(GOOD)[:-cut])

    (kind,) = refused(path)

    assert kind in ("safetensors.truncated", "safetensors.format")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_named(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pickle.dumps({"weights": [1.0] * 100}, protocol=protocol))

    assert refused(path) == ["safetensors.pickle"]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_save_file_is_named(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.safetensors"
    torch.save(GOOD, path, _use_new_zipfile_serialization=zipped)

    assert refused(path) == ["safetensors.pickle"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        raw(b"{"),
        raw([]),
        raw(b'{"a": 1, "a": 2}'),
        raw(b"[" * 100_000),
        raw(b"\xff\xfe"),
        raw({"__metadata__": {"a": 1}}),
        raw({"__metadata__": []}),
    ],
)
def test_anything_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)

    assert refused(path) == ["safetensors.format"]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        entry(0, 4) | {"dtype": "U9"},
        entry(0, 4) | {"dtype": ["U8"]},
        entry(0, 4) | {"shape": [5]},
        entry(0, 4) | {"shape": [-4]},
        entry(0, 4) | {"shape": [4.0]},
        entry(0, 4) | {"shape": "4"},
        entry(0, 4) | {"data_offsets": [0]},
        entry(0, 4) | {"data_offsets": [4, 0]},
        entry(0, 4) | {"data_offsets": [0, True]},
        entry(0, 4) | {"more": 1},
    ],
)
def test_an_unusable_entry_is_named(tmp_path: Path, broken: object) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"x": broken}, b"1234"))

    assert refused(path) == ["safetensors.entry"]


def test_overlapping_and_missing_bytes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)))
    assert refused(path) == ["safetensors.overlap"]
    path.write_bytes(raw({"a": entry(0, 4), "b": entry(5, 6)}, bytes(6)))
    assert refused(path) == ["safetensors.gap"]


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "x.safetensors") == ["file.missing"]
    assert refused(tmp_path) == ["file.missing"]


def test_offsets_are_counted_from_the_headers_end(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"a": entry(0, 2), "b": entry(2, 5)}, b"abcde"))

    assert read_header(path).tensors["b"] == TensorInfo("U8", (3,), 2, 5)
    assert read_int_tensor(path, "b") == list(b"cde")

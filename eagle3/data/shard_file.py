"""A shard that is filled while the target's layers pass: its header and size are known beforehand, its rows come slot
by slot, in any number of pieces.

The file has its whole size from the start, so that a full disk is an error before the work, and its states are mapped:
the kernel writes them out as they come, memory stays bounded.

Legend: T tokens of the shard, A aux layers, H target hidden, n rows of a piece.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.store_format import SampleInfo, ShardInfo, shard_layout
from eagle3.data.store_sample import header_metadata, token_faults
from eagle3.data.tensor_file import file_header
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import TEMPORARY_SUFFIX, explained_os_errors, sha256_file, sync_folder
from eagle3.wiring.contract import WiringContract

StateKey = int | Literal["last"]
"""An output index, or the states that the target's head reads."""

_DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ENGINE_FIX = "the engine mixes rows up: report this"


class ShardFile:
    """One shard under its temporary name; `close` gives it the final one.

    Args:
        path: final name of the shard.
        samples: what it holds, in order, at least one.
        contract: of the store.

    Raises:
        ProblemsError: a sample does not fit the contract; the disk is full. Nothing is left then.
    """

    def __init__(self, path: Path, samples: Sequence[TokenSample], contract: WiringContract) -> None:
        self.path = path
        self.samples = samples
        self._contract = contract
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        ids = {sample.id: torch.tensor(sample.input_ids, dtype=torch.int64) for sample in samples}
        raise_problems(
            Problem(f"{path}: sample {name!r}", f"store.{kind}", message, "correct what made this sample")
            for name, tensor in ids.items()
            for kind, message in token_faults(name, tensor, contract)
        )
        self._ends = list(accumulate(len(sample.input_ids) for sample in samples))
        self.tokens = self._ends[-1]
        self._claimed: dict[StateKey, int] = dict.fromkeys([*contract.output_indices, "last"], 0)
        layout = shard_layout(contract, self.tokens)
        header = file_header(layout, header_metadata(sample_info(sample) for sample in samples))
        with explained_os_errors(self._temporary):
            try:
                self._tensors = _mapped(self._temporary, header, layout)
            except OSError:
                self._temporary.unlink(missing_ok=True)
                raise
        self._tensors["input_ids"].copy_(torch.cat(list(ids.values())))
        mask = [value for sample in samples for value in sample.loss_mask]
        self._tensors["loss_mask"].copy_(torch.tensor(mask, dtype=torch.bool))

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """Takes rows `begin` ... of one slot; see `claim` and `write`."""
        self.claim(key, begin, len(states))
        self.write(key, begin, states)

    def claim(self, key: StateKey, begin: int, count: int) -> bool:
        """Announces the next rows of one slot, which come in order; whether they are its last.

        Raises:
            ProblemsError: a row is missing or comes twice.
        """
        if begin != self._claimed[key] or begin + count > self.tokens:
            message = f"rows {begin} to {begin + count} of {_said(key)} came, row {self._claimed[key]} was next"
            raise problem_error(str(self.path), "capture.rows", message, _ENGINE_FIX)
        self._claimed[key] += count
        return self._claimed[key] == self.tokens

    def write(self, key: StateKey, begin: int, states: torch.Tensor, sums: torch.Tensor | None = None) -> None:
        """Writes announced rows; several threads may, in any order.

        Args:
            states: [n, H] in the store's type, on the CPU.
            sums: [n], of each row in float32, if they are known.

        Raises:
            ProblemsError: a row is not finite (its sample is named).
        """
        self._check_finite(key, begin, states, states.sum(dtype=torch.float32) if sums is None else sums)
        self._slot(key)[begin : begin + len(states)] = states

    def sync(self) -> None:
        """Waits until what is written is on disk.

        Raises:
            ProblemsError: the disk is full after all, or another failure of it.
        """
        with explained_os_errors(self.path), open(self._temporary, "rb+") as handle:
            os.fsync(handle.fileno())

    def close(self) -> None:
        """Syncs the file and gives it its final name; it is whole then, but the manifest is yet to list it.

        All that was announced must be written.

        Raises:
            ProblemsError: a slot lacks rows, and nothing is left; or the disk is full.
        """
        missing = {key: rows for key, rows in self._claimed.items() if rows < self.tokens}
        if missing:
            self.discard()
            said = ", ".join(f"{_said(key)} has {rows}" for key, rows in missing.items())
            message = f"has {self.tokens} tokens, but {said} rows"
            raise problem_error(str(self.path), "capture.rows", message, _ENGINE_FIX)
        self.sync()
        with explained_os_errors(self.path):
            self._temporary.replace(self.path)
            sync_folder(self.path.parent)
        self._tensors.clear()

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._tensors.clear()
        self._temporary.unlink(missing_ok=True)

    def _slot(self, key: StateKey) -> torch.Tensor:
        """[T, H] of the mapped file."""
        if key == "last":
            return self._tensors["last_hidden_states"]
        slots = self._tensors["aux_hidden_states"].split(self._contract.hidden_size, dim=1)
        return slots[self._contract.output_indices.index(key)]

    def _check_finite(self, key: StateKey, begin: int, states: torch.Tensor, sums: torch.Tensor) -> None:
        # A sum is finite only if every term is; where it is not, a large sum may still be of finite terms.
        if torch.isfinite(sums).all() or torch.isfinite(states).all():
            return
        row = begin + int((~torch.isfinite(states).all(dim=1)).nonzero()[0])
        name = next(sample.id for sample, end in zip(self.samples, self._ends, strict=True) if row < end)
        message = f"has NaN or infinity in its {_said(key)}"
        raise problem_error(f"{self.path}: sample {name!r}", "store.non_finite", message, "check the target")


def sample_info(sample: TokenSample) -> SampleInfo:
    """What manifest and header say of a sample."""
    return SampleInfo(sample.id, len(sample.input_ids), sum(sample.loss_mask))


def shard_entry(path: Path, samples: Sequence[TokenSample]) -> ShardInfo:
    """What the manifest says of a shard that has its final name; reads all of it."""
    return ShardInfo(
        path.name, path.stat().st_size, sha256_file(path), tuple(sample_info(sample) for sample in samples)
    )


def _mapped(path: Path, header: bytes, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Makes the whole file, with this header; its tensors, mapped."""
    size = len(header) + sum(prod(shape) * _DTYPES[code].itemsize for code, shape in layout.values())
    with open(path, "wb+") as handle:
        os.posix_fallocate(handle.fileno(), 0, size)
        handle.write(header)
    content = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))
    tensors, offset = {}, len(header)
    for name, (code, shape) in layout.items():
        end = offset + prod(shape) * _DTYPES[code].itemsize
        tensors[name] = content[offset:end].view(_DTYPES[code]).view(shape)
        offset = end
    return tensors


def _said(key: StateKey) -> str:
    return "last hidden states" if key == "last" else f"output index {key}"

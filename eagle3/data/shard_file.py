"""A shard that is filled while the target's layers pass: its header and size are known beforehand, its rows come slot
by slot, in any number of pieces, and the target's greedy tokens sample by sample.

The file has its whole size from the start, so that a full disk is an error before the work, and its states are mapped:
the kernel writes them out as they come, memory stays bounded.

Legend: T tokens of the shard, A aux layers, H target hidden, n rows of a piece, R of a sample's last hidden states.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.store_format import SampleInfo, ShardInfo
from eagle3.data.store_layout import StoreLayout, TensorLayout
from eagle3.data.store_sample import argmax_faults, header_metadata, token_faults
from eagle3.data.tensor_file import TORCH_DTYPES, file_header
from eagle3.draft.states import quantize
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import TEMPORARY_SUFFIX, explained_os_errors, sha256_file, sync_folder

StateKey = int | Literal["last"]
"""An output index, or the states that the target's head reads."""

_ENGINE_FIX = "the engine mixes rows up: report this"


class ShardFile:
    """One shard under its temporary name; `close` gives it the final one.

    Args:
        path: final name of the shard.
        samples: what it holds, in order, at least one.
        layout: of the store.

    Raises:
        ProblemsError: a sample does not fit the contract; the disk is full. Nothing is left then.
    """

    def __init__(self, path: Path, samples: Sequence[TokenSample], layout: StoreLayout) -> None:
        self.path = path
        self.samples = samples
        self._layout = layout
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        ids = {sample.id: torch.tensor(sample.input_ids, dtype=torch.int64) for sample in samples}
        raise_problems(
            Problem(f"{path}: sample {name!r}", f"store.{kind}", message, "correct what made this sample")
            for name, tensor in ids.items()
            for kind, message in token_faults(name, tensor, layout.contract)
        )
        self._ends = list(accumulate(len(sample.input_ids) for sample in samples))
        self.tokens = self._ends[-1]
        self._claimed: dict[StateKey, int] = dict.fromkeys([*layout.contract.output_indices, "last"], 0)
        mask = torch.tensor([value for sample in samples for value in sample.loss_mask], dtype=torch.bool)
        self._last_rows = mask if layout.last_rows == "supervised" else torch.ones_like(mask)
        self._argmax: set[int] = set()
        tensors = layout.tensors(self.tokens, int(mask.sum()))
        header = file_header(tensors, header_metadata((sample_info(item) for item in samples), layout.version))
        with explained_os_errors(self._temporary):
            try:
                self._tensors = _mapped(self._temporary, header, tensors)
            except OSError:
                self._temporary.unlink(missing_ok=True)
                raise
        self._tensors["input_ids"].copy_(torch.cat(list(ids.values())))
        self._tensors["loss_mask"].copy_(mask)

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """Takes rows `begin` ... of one slot, [n, H] in the layout's value type; see `claim` and `write`."""
        self.claim(key, begin, len(states))
        self.write(key, begin, *(quantize(states) if self._layout.scaled else (states,)))

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

    def write(self, key: StateKey, begin: int, states: torch.Tensor, numbers: torch.Tensor | None = None) -> None:
        """Writes announced rows; several threads may, in any order. Last hidden states are taken where they are stored.

        Args:
            states: [n, H] in the store's type, on the CPU.
            numbers: float32 [n], a number of each row: its scale in an fp8 store; else its sum, if it is known.

        Raises:
            ProblemsError: a row is not finite (its sample is named).
        """
        self._check_finite(key, begin, states, states.sum(dtype=torch.float32) if numbers is None else numbers)
        rows = slice(begin, begin + len(states))
        if key == "last":
            kept = self._last_rows[rows]
            first = int(self._last_rows[:begin].sum())
            rows, states = slice(first, first + int(kept.sum())), states[kept]
            numbers = None if numbers is None else numbers[kept]
        values, scales = self._slot(key)
        values[rows] = states
        if scales is not None:
            assert numbers is not None
            scales[rows] = numbers

    def last_places(self, sample: int) -> torch.Tensor:
        """int64 [R]: the tokens of a sample, by its number here and counted from its first, of which last hidden states
        are stored."""
        end = self._ends[sample]
        return self._last_rows[end - len(self.samples[sample].input_ids) : end].nonzero().flatten()

    def write_argmax(self, sample: int, argmax: torch.Tensor) -> None:
        """Takes the target's greedy tokens at a sample's `last_places`, any integers [R] on the CPU.

        Raises:
            ProblemsError: they are not so many, or not in the vocabulary.
        """
        name, places = self.samples[sample].id, self.last_places(sample)
        raise_problems(
            Problem(f"{self.path}: sample {name!r}", f"store.{kind}", message, _ENGINE_FIX)
            for kind, message in argmax_faults(argmax, [len(places)], self._layout.contract)
        )
        begin = int(self._last_rows[: self._ends[sample] - len(self.samples[sample].input_ids)].sum())
        self._tensors["target_argmax"][begin : begin + len(places)] = argmax.to(self._layout.ids_dtype)
        self._argmax.add(sample)

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
            ProblemsError: a slot lacks rows, or a sample its greedy tokens, and nothing is left; or the disk is full.
        """
        missing = {key: rows for key, rows in self._claimed.items() if rows < self.tokens}
        if missing:
            self.discard()
            said = ", ".join(f"{_said(key)} has {rows}" for key, rows in missing.items())
            message = f"has {self.tokens} tokens, but {said} rows"
            raise problem_error(str(self.path), "capture.rows", message, _ENGINE_FIX)
        lacking = [item.id for number, item in enumerate(self.samples) if number not in self._argmax]
        if lacking and self._layout.has_argmax:
            self.discard()
            message = f"has no greedy tokens of {len(lacking)} of its {len(self.samples)} samples, {lacking[0]!r} first"
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

    def _slot(self, key: StateKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] of the mapped file (of the last hidden states: what is stored), and any scales [T]."""
        if key == "last":
            return self._tensors["last_hidden_states"], self._tensors.get("last_scales")
        slot, hidden = self._layout.contract.output_indices.index(key), self._layout.contract.hidden_size
        values = self._tensors["aux_hidden_states"][:, slot * hidden : (slot + 1) * hidden]
        return values, self._tensors["aux_scales"][:, slot] if self._layout.scaled else None

    def _check_finite(self, key: StateKey, begin: int, states: torch.Tensor, numbers: torch.Tensor) -> None:
        # A sum is finite only if every term is; where it is not, a large sum may still be of finite terms.
        # A scale is NaN where a term is not finite.
        if torch.isfinite(numbers).all():
            return
        bad = ~torch.isfinite(numbers) if self._layout.scaled else ~torch.isfinite(states).all(dim=1)
        if not bad.any():
            return
        row = begin + int(bad.nonzero()[0])
        name = next(sample.id for sample, end in zip(self.samples, self._ends, strict=True) if row < end)
        message = f"has NaN or infinity in its {_said(key)}"
        raise problem_error(f"{self.path}: sample {name!r}", "store.non_finite", message, "check the target")


def sample_info(sample: TokenSample) -> SampleInfo:
    """What manifest and header say of a sample."""
    return SampleInfo(sample.id, len(sample.input_ids), sum(sample.loss_mask), sample.source)


def shard_entry(path: Path, samples: Sequence[TokenSample]) -> ShardInfo:
    """What the manifest says of a shard that has its final name; reads all of it."""
    return ShardInfo(
        path.name, path.stat().st_size, sha256_file(path), tuple(sample_info(sample) for sample in samples)
    )


def _mapped(path: Path, header: bytes, layout: TensorLayout) -> dict[str, torch.Tensor]:
    """Makes the whole file, with this header; its tensors, mapped."""
    size = len(header) + sum(prod(shape) * TORCH_DTYPES[code].itemsize for code, shape in layout.values())
    with open(path, "wb+") as handle:
        os.posix_fallocate(handle.fileno(), 0, size)
        handle.write(header)
    content = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))
    tensors, offset = {}, len(header)
    for name, (code, shape) in layout.items():
        end = offset + prod(shape) * TORCH_DTYPES[code].itemsize
        tensors[name] = content[offset:end].view(TORCH_DTYPES[code]).view(shape)
        offset = end
    return tensors


def _said(key: StateKey) -> str:
    return "last hidden states" if key == "last" else f"output index {key}"

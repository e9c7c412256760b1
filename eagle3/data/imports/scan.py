"""Reads a whole dump once, a sample at a time by several threads, and says what can be imported and what cannot.

Of a sample its name, its length and two counts are kept: memory does not grow with the states.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from eagle3.data.imports.folder import Dump
from eagle3.data.imports.masks import Masks
from eagle3.data.imports.sample import Expected, RawSample, faults, state_fault
from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.progress import progress

NOT_SUPERVISED = "no supervised token"
"""Why a good sample is left out, as extraction does with conversations: nothing would be learned from it."""

_MOST_WORKERS = 8


@dataclass(frozen=True)
class Found:
    """A sample that can be imported.

    Attributes:
        name: path in the dump, its id in the store.
        tokens, supervised: how many.
        dtype: of its states in the file.
        digest: of its token ids and its mask.
    """

    name: str
    tokens: int
    supervised: int
    dtype: torch.dtype
    digest: bytes


@dataclass(frozen=True)
class Scan:
    """What a dump holds.

    Attributes:
        found: what can be imported, in the dump's order; each has a supervised token.
        left_out: how many others there are, by the kind of their first problem, or `NOT_SUPERVISED`.
        problems: all that is wrong with those that cannot be imported.
    """

    found: Sequence[Found]
    left_out: Counter[str]
    problems: Sequence[Problem]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.found)

    @property
    def supervised(self) -> int:
        return sum(sample.supervised for sample in self.found)

    @property
    def dtypes(self) -> Counter[str]:
        """How many samples have states of each type."""
        return Counter(str(sample.dtype).removeprefix("torch.") for sample in self.found)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of names, token ids and masks, in order."""
        total = hashlib.sha256()
        for sample in self.found:
            total.update(f"{sample.name}\0{sample.tokens}\0".encode() + sample.digest)
        return f"sha256:{total.hexdigest()}"

    def __str__(self) -> str:
        total = len(self.found) + self.left_out.total()
        lines = [f"{len(self.found):,} of {total:,} samples: {self.tokens:,} tokens, {self.supervised:,} supervised"]
        lines += [f"{count:,} of {total:,} left out: {kind}" for kind, count in sorted(self.left_out.items())]
        return "\n".join(lines)


def scan_dump(
    dump: Dump,
    masks: Masks,
    expected: Expected,
    store_dtype: torch.dtype | None = None,
    is_known: Callable[[str], bool] = lambda name: False,
    workers: int | None = None,
) -> Scan:
    """Reads every sample; a bad one is a problem of the result, not an error. States of one without a supervised token
    are not looked at.

    Args:
        dump, masks, expected: see there.
        store_dtype: type that the states will be rounded to; None is the file's own.
        is_known: whether a sample's states are in the store already and need not be looked at again.
        workers: files that are read at a time; default: one a core, 8 at most.
    """
    found: dict[int, Found | list[Problem]] = {}
    pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    with progress("check", len(dump.names), "samples") as advance:
        try:
            futures = {
                pool.submit(_checked, dump, masks, expected, store_dtype, name, is_known(name)): number
                for number, name in enumerate(dump.names)
            }
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
    ordered = [found[number] for number in range(len(dump.names))]
    bad = [item for item in ordered if not isinstance(item, Found)]
    good = [item for item in ordered if isinstance(item, Found)]
    left_out = Counter(problems[0].kind for problems in bad)
    left_out.update(NOT_SUPERVISED for item in good if not item.supervised)
    return Scan(
        found=[item for item in good if item.supervised],
        left_out=left_out,
        problems=[problem for problems in bad for problem in problems],
    )


def read_sample(dump: Dump, masks: Masks, expected: Expected, name: str) -> RawSample:
    """One sample with its mask, its shapes, types and ids checked; its states are mapped, not read.

    Raises:
        ProblemsError: everything that is wrong with it.
    """
    path = dump.folder / name
    raw = dump.format.read(path)
    # The mask is asked for last, since another source than the file needs good token ids.
    unmasked = faults(replace(raw, loss_mask=None), expected)
    if not unmasked:
        raw = replace(raw, loss_mask=masks.mask(str(path), name, raw))
        unmasked = faults(raw, expected)
    raise_problems(Problem(str(path), f"import.{kind}", message, fix) for kind, message, fix in unmasked)
    return raw


def _checked(
    dump: Dump, masks: Masks, expected: Expected, store_dtype: torch.dtype | None, name: str, is_known: bool
) -> Found | list[Problem]:
    try:
        raw = read_sample(dump, masks, expected, name)
    except ProblemsError as error:
        return list(error.problems)
    assert raw.loss_mask is not None
    dtype, supervised = raw.aux_hidden_states.dtype, int(raw.loss_mask.to(torch.uint8).sum())
    fault = None if is_known or not supervised else state_fault(raw, store_dtype or dtype)
    if fault is not None:
        return [Problem(str(dump.folder / name), f"import.{fault[0]}", *fault[1:])]
    return Found(name, len(raw.input_ids), supervised, dtype, tokens_digest(raw))


def tokens_digest(raw: RawSample) -> bytes:
    """SHA-256 of a sample's token ids and its mask."""
    assert raw.loss_mask is not None
    ids, mask = raw.input_ids.to(torch.int64).contiguous(), raw.loss_mask.to(torch.uint8).contiguous()
    return hashlib.sha256(ids.numpy().tobytes() + mask.numpy().tobytes()).digest()

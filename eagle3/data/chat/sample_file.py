"""Samples on disk in place of memory: a scratch file without a name, gone with the process however that ends.

A sample's record is its id (UTF-8), its token ids (uint32) and its loss mask (a bit a token). In memory stay 28 bytes
a sample: where its record begins, and its counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar, overload

import numpy

from eagle3.data.chat.report import TokenSample
from eagle3.data.scratch import Scratch

Item = TypeVar("Item")
Value = TypeVar("Value")


class SampleFile(Sequence[TokenSample]):
    """Samples in the order in which they were added; each is read again whenever it is asked for."""

    def __init__(self, folder: Path, share: Callable[[], float | None] = lambda: None) -> None:
        """Args:
        folder: whose disk holds them; where it is not there yet, or may not be written to, one that is.
        share: about which share of all samples was added, see `Scratch`.
        """
        self._records = Scratch(folder, share)
        self._id_bytes, self._tokens, self._supervised = array("I"), array("I"), array("I")
        self._sources: dict[str | None, int] = {}
        self._source_names: list[str | None] = []
        self._source_of = array("I")

    def add(self, sample: TokenSample) -> None:
        """Appends it.

        Raises:
            ProblemsError: kind `chat.scratch`, the disk cannot hold them all; kinds `disk.*`, it is full, for example.
        """
        name = sample.id.encode()
        record = name + array("I", sample.input_ids).tobytes() + numpy.packbits(sample.loss_mask).tobytes()
        self._records.add(record)
        self._id_bytes.append(len(name))
        self._tokens.append(len(sample.input_ids))
        self._supervised.append(sum(sample.loss_mask))
        if sample.source not in self._sources:
            self._sources[sample.source] = len(self._source_names)
            self._source_names.append(sample.source)
        self._source_of.append(self._sources[sample.source])

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> TokenSample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenSample]: ...
    def __getitem__(self, index: int | slice) -> TokenSample | Sequence[TokenSample]:
        if isinstance(index, slice):
            return chosen(self, range(len(self))[index])
        place = range(len(self))[index]
        name, tokens = self._id_bytes[place], self._tokens[place]
        record = self._records.read(place)
        ids = numpy.frombuffer(record, numpy.uint32, tokens, name)
        mask = numpy.unpackbits(numpy.frombuffer(record, numpy.uint8, offset=name + 4 * tokens), count=tokens)
        source = self._source_names[self._source_of[place]]
        return TokenSample(record[:name].decode(), ids.tolist(), mask.astype(bool).tolist(), source)

    def __iter__(self) -> Iterator[TokenSample]:
        return (self[index] for index in range(len(self)))


class Each(Sequence[Value], Generic[Item, Value]):
    """Something of each item of a sequence, made when it is asked for."""

    def __init__(self, items: Sequence[Item], of: Callable[[Item], Value]) -> None:
        self._items, self._of = items, of

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Value]: ...
    def __getitem__(self, index: int | slice) -> Value | Sequence[Value]:
        if isinstance(index, slice):
            return Each(self._items[index], self._of)
        return self._of(self._items[index])


def chosen(samples: Sequence[TokenSample], numbers: Sequence[int]) -> Sequence[TokenSample]:
    """Some of other samples, by number."""

    def sample(number: int) -> TokenSample:
        return samples[number]

    return Each(numbers, sample)

"""The target's greedy tokens of a chunk, made on the walk's device while its last hidden states pass: there they are,
and the host would take as long for a token as the device for hundreds.

Legend: H target hidden, n rows of a piece, R of a sample's last hidden states that are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from eagle3.data.shard_file import ShardFile
from eagle3.data.target_argmax import greedy_tokens
from eagle3.draft.loss import TargetHead


@dataclass
class _Sample:
    """A sample on its way: its number in its shard, the chunk's rows that are wanted, and what came of these."""

    file: ShardFile
    number: int
    end: int
    wanted: torch.Tensor
    came: list[torch.Tensor] = field(default_factory=list)


class ArgmaxRows:
    """Makes them one sample at a time, so that they depend on no other one.

    Args:
        files: the shards to fill, each with its first row in the chunk, ascending.
        head: puts the target's head on the device; called when the first states come, and let go with the last.
        dtype: the store's value type.
    """

    def __init__(
        self, files: Sequence[tuple[int, ShardFile]], head: Callable[[], TargetHead], dtype: torch.dtype
    ) -> None:
        self._make, self._dtype = head, dtype
        self._head: TargetHead | None = None
        self._samples: deque[_Sample] = deque()
        for begin, file in files:
            for number, sample in enumerate(file.samples):
                end = begin + len(sample.input_ids)
                self._samples.append(_Sample(file, number, end, begin + file.last_places(number)))
                begin = end

    def take(self, begin: int, states: torch.Tensor) -> None:
        """Last hidden states [n, H] of rows `begin` ... of the chunk, on the device; pieces come in order.

        Raises:
            ProblemsError: as `ShardFile.write_argmax`.
        """
        end = begin + len(states)
        done: list[tuple[_Sample, torch.Tensor]] = []
        while self._samples:
            sample = self._samples[0]
            inside = sample.wanted[(sample.wanted >= begin) & (sample.wanted < end)] - begin
            if len(inside):
                sample.came.append(states[inside.to(states.device)].to(self._dtype))
            if sample.end > end:
                break
            self._samples.popleft()
            rows = torch.cat(sample.came) if sample.came else states[:0].to(self._dtype)
            sample.came.clear()
            done.append((sample, greedy_tokens(rows, self._on_device())))
        if done:
            found = torch.cat([argmax for _, argmax in done]).cpu()  # one wait for the device
            for (sample, _), argmax in zip(done, found.split([len(rows) for _, rows in done]), strict=True):
                sample.file.write_argmax(sample.number, argmax)
        if not self._samples:
            self._head = None

    def _on_device(self) -> TargetHead:
        if self._head is None:
            self._head = self._make()
        return self._head

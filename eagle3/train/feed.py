"""Where a run's windows come from: a store that lies there, or a ring that is filled while it trains."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from eagle3.data.batch_plan import BatchPlan
from eagle3.data.dealing import Window, places_of, rank_loads
from eagle3.data.loader import Begun, begin_windows
from eagle3.data.store import StoreReader
from eagle3.data.store_layout import StoreLayout
from eagle3.draft.config import TTTSettings
from eagle3.draft.cost import Work
from eagle3.files import is_url
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint

_MOST_WAITING = 0.02


class Dataset(Protocol):
    """What a store and a ring have in common."""

    @property
    def folder(self) -> Path:
        """Where it lies."""
        ...

    @property
    def name(self) -> str:
        """Its folder or URL, for messages."""
        ...

    @property
    def contract(self) -> WiringContract:
        """What the states are."""
        ...

    @property
    def layout(self) -> StoreLayout:
        """What its shards hold."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What the samples depend on."""
        ...

    @property
    def target_config(self) -> dict[str, Any]:
        """The target's text config."""
        ...

    @property
    def fingerprint(self) -> Fingerprint | None:
        """A few numbers of the states."""
        ...

    def target_head(self) -> dict[str, torch.Tensor]:
        """See `StoreReader.target_head`."""
        ...


class Feed(Protocol):
    """The windows of a run, in order, and their batches."""

    @property
    def epoch_steps(self) -> Sequence[int]:
        """Windows of each epoch."""
        ...

    def epoch(self, number: int) -> list[Window]:
        """All windows of an epoch, from 0."""
        ...

    def epoch_in_order(self, number: int) -> list[Window]:
        """The same with each window's rows dealt to ranks as they come, whatever they cost; for comparison."""
        ...

    def loads(self, window: Window) -> list[int]:
        """What each rank has to do in a window; see `eagle3.draft.cost`."""
        ...

    def load(self, windows: Sequence[Window], rank: int, ttt: TTTSettings) -> Generator[Begun, None, None]:
        """Begins to read a window each time that it is asked for the next one; its batches are planned for `ttt`."""
        ...

    def tokens(self, window: Window) -> int:
        """Tokens of all ranks."""
        ...

    def work(self, window: Window) -> Work:
        """What all ranks have to do."""
        ...

    def ids(self, window: Window) -> list[str]:
        """Sample ids of all ranks."""
        ...

    def opened(self, step: int, last: int, run_id: str, is_main: bool) -> AbstractContextManager[None]:
        """What encloses the training of the windows after `step` steps up to step `last`, on every rank.

        Args:
            run_id: the same whenever the run is started again from a checkpoint.
        """
        ...

    @property
    def releases(self) -> bool:
        """Whether `saved` gives up what a run without that checkpoint needs: it must be in place before."""
        ...

    def must_save(self, step: int) -> bool:
        """Whether a checkpoint is needed after `step` steps, so that there is room for what follows."""
        ...

    def saved(self, step: int, last: bool, is_main: bool) -> None:
        """There is a checkpoint of `step` steps: every rank has done them, and none is taken again."""
        ...

    def note(self, share: float, seconds: float) -> str:
        """What to say of the waiting for data at a run's end, in words, or nothing.

        Args:
            share: of the training time.
            seconds: in all.
        """
        ...

    @property
    def faster(self) -> str:
        """What makes data come faster, in words."""
        ...


def work_of(samples: Iterable[tuple[int, int]]) -> Work:
    """Of samples with so many tokens and supervised ones."""
    pairs = list(samples)
    keys = sum(tokens * supervised // 2 for tokens, supervised in pairs)
    return Work(sum(tokens for tokens, _ in pairs), sum(supervised for _, supervised in pairs), keys)


class StoreFeed:
    """Windows of a store; see `Feed`.

    Args:
        reader: the store.
        indices: the plan's sample i is sample `indices[i]` of the store.
        plan: order and division of the samples.
        epochs: passes over them.
        supervised: tokens of each of the plan's samples, within its length.
    """

    releases = False

    def __init__(
        self, reader: StoreReader, indices: Sequence[int], plan: BatchPlan, epochs: int, supervised: Sequence[int] = ()
    ) -> None:
        self._reader, self._indices, self._plan = reader, indices, plan
        self._epochs, self._supervised = epochs, supervised

    @property
    def epoch_steps(self) -> list[int]:
        return [self._plan.steps_per_epoch] * self._epochs

    def epoch(self, number: int) -> list[Window]:
        return self._plan.epoch(number)

    def epoch_in_order(self, number: int) -> list[Window]:
        return self._plan.epoch_in_order(number)

    def loads(self, window: Window) -> list[int]:
        return rank_loads(window, self._plan.cost)

    def load(self, windows: Sequence[Window], rank: int, ttt: TTTSettings) -> Generator[Begun, None, None]:
        return begin_windows(self._reader, windows, self._indices, self._plan.max_length, rank, ttt=ttt)

    def tokens(self, window: Window) -> int:
        return sum(self._plan.lengths[place] for place in places_of(window))

    def work(self, window: Window) -> Work:
        return work_of((self._plan.lengths[place], self._supervised[place]) for place in places_of(window))

    def ids(self, window: Window) -> list[str]:
        return [self._reader.samples[self._indices[place]].id for place in places_of(window)]

    def opened(self, step: int, last: int, run_id: str, is_main: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def must_save(self, step: int) -> bool:
        return False

    def saved(self, step: int, last: bool, is_main: bool) -> None:
        pass

    def note(self, share: float, seconds: float) -> str:
        if share < _MOST_WAITING or seconds < 1:
            return ""
        return (
            f"note: training waited for data {share:.0%} of its time ({seconds:.0f} s): the store's disk, "
            "or the network before it, gives less than training takes; benchmarks/store.py measures it, see "
            "docs/training.md"
        )

    @property
    def faster(self) -> str:
        if is_url(self._reader.name):
            return (
                "raise cache.threads, let cache.max_bytes hold the whole store (later epochs are then read here), put "
                "cache.folder on a faster local disk, or fetch the store first (eagle3 data pull)"
            )
        return (
            f"copy {self._reader.name} to a faster or local disk, make a store of half as many bytes of it (eagle3 "
            "extract --from with --dtype fp8), or give each process more cores, for eight threads read"
        )

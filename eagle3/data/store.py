"""The hidden-state store: a reader that maps shards lazily; the writer is in `store_writer`.

Legend: T tokens of a sample, H target hidden, V target vocab.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3.data.store_check import INCOMPLETE, check_store
from eagle3.data.store_format import TARGET_HEAD_FILE, SampleInfo, load_manifest
from eagle3.data.store_sample import StoredSample
from eagle3.data.store_verify import verify
from eagle3.data.store_writer import StoreWriter
from eagle3.errors import problem_error, raise_problems
from eagle3.wiring.contract import WiringContract

__all__ = ["StoreReader", "StoreWriter", "StoredSample", "verify"]

_OPEN_SHARDS = 32


class StoreReader:
    """A store that is whole. Opening it reads the manifest and each file's header; states are mapped when read.

    Args:
        folder: of the store.
        expected: the contract that the caller needs.
        allow_incomplete: take a store whose extraction has not ended.

    Raises:
        ProblemsError: anything that `eagle3.data.store_check.check_store` finds, all of it.
    """

    def __init__(
        self, folder: Path | str, expected: WiringContract | None = None, allow_incomplete: bool = False
    ) -> None:
        self.folder = Path(folder)
        manifest = load_manifest(self.folder)
        problems = check_store(self.folder, manifest, expected)
        if allow_incomplete:
            problems = [problem for problem in problems if problem.kind != INCOMPLETE]
        raise_problems(problems, f"cannot use the hidden states in {folder}")
        self.contract = manifest.contract
        self.settings = manifest.settings
        self.target_config = manifest.target_config
        self.fingerprint = manifest.fingerprint
        self.samples: list[SampleInfo] = []
        self._places: list[tuple[str, int]] = []
        for shard in manifest.shards:
            row = 0
            for sample in shard.samples:
                self.samples.append(sample)
                self._places.append((shard.file, row))
                row += sample.tokens
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(lambda file: safe_open(self.folder / file, "pt"))

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> StoredSample:
        """Sample `index` (0-based, manifest order); its tensors are mapped from disk, not loaded."""
        names = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states")
        input_ids, loss_mask, aux, last = (self._slice(index, name) for name in names)
        self._check_ids(index, input_ids)
        return StoredSample(self.samples[index].id, input_ids, loss_mask.bool(), aux, last)

    def read_tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int32 [T] and loss_mask bool [T] of sample `index`, without its states."""
        input_ids = self._slice(index, "input_ids")
        self._check_ids(index, input_ids)
        return input_ids, self._slice(index, "loss_mask").bool()

    def place(self, index: int) -> tuple[str, int]:
        """The shard's file that sample `index` is in, and its first row there."""
        return self._places[index]

    def target_head(self) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H], and `lm_head.weight` [V, H] (the embedding, if tied)."""
        tensors = load_file(self.folder / TARGET_HEAD_FILE)
        return {"lm_head.weight": tensors["embed_tokens.weight"], **tensors}

    def _check_ids(self, index: int, input_ids: torch.Tensor) -> None:
        """An id outside the vocabulary would fail far from here, on a GPU without saying where."""
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= self.contract.vocab_size:
            where = f"{self.folder / self._places[index][0]}: sample {self.samples[index].id!r}"
            message = f"has token ids outside 0 to {self.contract.vocab_size - 1}: the shard is damaged"
            fix = "run `eagle3 data repair`, then `eagle3 extract` again"
            raise problem_error(where, "store.ids_out_of_range", message, fix)

    def _slice(self, index: int, name: str) -> torch.Tensor:
        file, row = self._places[index]
        return self._open(file).get_slice(name)[row : row + self.samples[index].tokens]

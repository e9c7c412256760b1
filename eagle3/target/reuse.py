"""States that another store has already: `eagle3 extract --from` then copies them, and the target does not run.

Legend: A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import load_file

from eagle3.data.open_reader import open_reader
from eagle3.data.store import StoredSample, StoreReader
from eagle3.data.store_format import TARGET_HEAD_FILE
from eagle3.target.plan import ExtractPlan
from eagle3.target.write import Done, Make, Write

_SAME = ("target_config_digest", "num_hidden_layers", "hidden_size", "last_hidden_states")


def changes(plan: ExtractPlan) -> list[str]:
    """What differs between the contract of the store that is extracted from and the new one's, a line each."""
    assert plan.cfg.from_store is not None
    source = plan.cfg.from_store
    lines = [
        problem.message
        for problem in open_reader(source, plan.cfg.cache).contract.compare(plan.contract, source, plan.cfg.output)
    ]
    return lines or ["both stores have the same contract"]


def reusable(plan: ExtractPlan) -> StoreReader | None:
    """The store to copy from: the same target in the same type, all layers and rows, no wider type; else None."""
    if plan.cfg.from_store is None:
        return None
    reader = open_reader(plan.cfg.from_store, plan.cfg.cache)
    old, new = reader.contract, plan.contract
    narrower = old.dtype in (new.dtype, "float32") or (plan.layout.scaled and old.dtype == "bfloat16")
    rows = reader.layout.last_rows in ("all", plan.layout.last_rows)
    same = all(getattr(old, name) == getattr(new, name) for name in _SAME)
    same = same and reader.settings.get("target") == plan.settings["target"]
    covered = set(new.output_indices) <= set(old.output_indices)
    return reader if same and narrower and rows and covered else None


def copy_states(plan: ExtractPlan, reader: StoreReader, write: Write[Done]) -> Done:
    """Writes the samples that are lacking, from the old store's states."""
    return write(plan, load_file(reader.folder / TARGET_HEAD_FILE), copier(plan, reader), label="copy")


def copier(plan: ExtractPlan, reader: StoreReader) -> Make:
    """Gives the plan's samples with the old store's states."""
    old = reader.contract
    slots = [old.output_indices.index(index) for index in plan.contract.output_indices]
    places = {sample.id: index for index, sample in enumerate(reader.samples)}

    def make(missing: Sequence[int]) -> Iterator[tuple[int, StoredSample]]:
        chosen = [places[plan.samples[index].id] for index in missing]
        with reader.ahead([[place] for place in chosen]) as done:
            for index, place in zip(missing, chosen, strict=True):
                yield index, _copied(reader, place, slots, plan.layout.value_dtype)
                done(1)

    return make


def _copied(reader: StoreReader, index: int, slots: list[int], dtype: torch.dtype) -> StoredSample:
    sample = reader.read(index)
    parts = sample.aux_hidden_states.split(reader.contract.hidden_size, dim=-1)
    return StoredSample(
        id=sample.id,
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        aux_hidden_states=torch.cat([parts[slot] for slot in slots], dim=-1).to(dtype),
        last_hidden_states=sample.last_hidden_states.to(dtype),
        target_argmax=sample.target_argmax,
        source=sample.source,
    )

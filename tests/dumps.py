"""Dumps in the layouts of SpecForge, speculators and Model-Optimizer, written by hand: see docs/import.md.

Shapes: T tokens, A aux layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class DumpSample:
    """ids [T], mask [T], aux: A of [T, H], last [T, H]."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: Sequence[torch.Tensor]
    last: torch.Tensor

    def cut(self, **lengths: int) -> DumpSample:
        """With fields cut to fewer tokens; `aux` cuts all of its layers."""
        changed: dict[str, Any] = {
            name: getattr(self, name)[:count] for name, count in lengths.items() if name != "aux"
        }
        if "aux" in lengths:
            changed["aux"] = [layer[: lengths["aux"]] for layer in self.aux]
        return replace(self, **changed)


def random_dump_sample(
    tokens: int = 12, num_aux: int = 2, hidden: int = 16, vocab: int = 32, seed: int = 0
) -> DumpSample:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_aux + 1, tokens, hidden, generator=generator).bfloat16()
    return DumpSample(
        ids=torch.randint(0, vocab, (tokens,), generator=generator),
        mask=(torch.arange(tokens) >= tokens // 2).long(),
        aux=list(states[:-1]),
        last=states[-1],
    )


def specforge_values(sample: DumpSample) -> dict[str, Any]:
    return {
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "hidden_state": sample.last[None],
        "aux_hidden_state": torch.cat(list(sample.aux), dim=-1)[None],
    }


def modelopt_values(sample: DumpSample) -> dict[str, Any]:
    return {
        "input_ids": sample.ids,
        "hidden_states": sample.last,
        "aux_hidden_states": torch.cat(list(sample.aux), dim=-1),
        "loss_mask": sample.mask,
        "conversation_id": "abc",
    }


def speculators_values(sample: DumpSample) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.stack([*sample.aux, sample.last], dim=1), "token_ids": sample.ids}


def write_specforge(folder: Path, samples: Sequence[DumpSample]) -> Path:
    for number, sample in enumerate(samples):
        path = folder / f"rows_0-{len(samples)}" / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(specforge_values(sample), path)
    return folder


def write_modelopt(folder: Path, samples: Sequence[DumpSample]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples):
        torch.save(modelopt_values(sample), folder / f"conversation-{number}.pt")
    return folder


def write_speculators(folder: Path, samples: Sequence[DumpSample]) -> Path:
    """The folder of states; their masks are in the dataset above it, where prepare_data.py writes it."""
    from datasets import Dataset

    rows = {
        "input_ids": [sample.ids.tolist() for sample in samples],
        "loss_mask": [sample.mask.tolist() for sample in samples],
    }
    Dataset.from_dict(rows).save_to_disk(str(folder / "data"))
    states = folder / "data" / "hidden_states"
    states.mkdir()
    for number, sample in enumerate(samples):
        save_file(speculators_values(sample), states / f"hs_{number}.safetensors")
    return states


WRITERS: dict[str, Callable[[Path, Sequence[DumpSample]], Path]] = {
    "specforge": write_specforge,
    "modelopt": write_modelopt,
    "speculators": write_speculators,
}

"""`eagle3 wiring probe --target`: stored states against the target's own, computed again.

A few samples of the store, and its fingerprint, go through the target once. What each slot holds is told from the
numbers alone (`eagle3.wiring.diagnosis`), whatever the store's contract says.

Legend: T tokens, C channels, H target hidden, N decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eagle3.config import StreamSection, TargetConfig
from eagle3.config.schema import Dtype
from eagle3.data.store import StoreReader
from eagle3.data.store_format import MANIFEST_FILE, load_manifest
from eagle3.errors import raise_problems
from eagle3.target.engine_choice import choose_engine
from eagle3.target.engines.streamed import StreamedEngine
from eagle3.target.engines.transformers import TransformersEngine, load_model
from eagle3.target.resolve import TargetFiles, find_target, pick_device, weights_digest
from eagle3.target.selfcheck import pick_samples
from eagle3.target.streaming.memory import plan_memory
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.streaming.walk import LAST
from eagle3.wiring.checkpoint_target import compare_target
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Measured, allowed_error, coarser, diagnose
from eagle3.wiring.fingerprint import measure
from eagle3.wiring.fingerprint_file import Fingerprint, load_fingerprint
from eagle3.wiring.layers import EMBEDDING, LayerWiring
from eagle3.wiring.probe_report import ProbeReport

ProbeEngine = Literal["auto", "transformers", "streamed"]
States = Mapping[Boundary, torch.Tensor]
"""Boundary -> [T, H] of one sample."""

LAST_SLOT = "last hidden states"
PROBED_TOKENS = 256
_AGAIN = "extract again with this target"
FIXES = {
    **dict.fromkeys(
        ("one_early", "one_late", "embedding", "other_layer", "permuted"),
        f"{_AGAIN}; if these states are what you want, make the contract's output_indices say so and train anew",
    ),
    **dict.fromkeys(
        ("post_norm", "pre_norm"),
        f"{_AGAIN}, or correct last_hidden_states in the contract: training norms what is said to be pre-norm",
    ),
    "misaligned": "store in row t the state of token t: the drafter pairs it with the embedding of token t + 1 itself",
    "rows": f"{_AGAIN}, one sample a pass (a small batch_tokens); check what the engine does with padding and batches",
    "padding": f"{_AGAIN}: pad on the right, or mask padding out",
    "precision": f"{_AGAIN}, in the type that the contract names, or say in the contract what the values are",
    "other_weights": "probe with the checkpoint that the states were extracted from, or extract again with this one",
    "other_target": "check that target and tokenizer are those of the extraction, else extract again",
}


@dataclass(frozen=True)
class StoredStates:
    """States of one sample, as they are stored or will be: their tokens and, by slot, [rows, channels]; rows are those
    of `positions`, the last slot's those of `last_positions` (default: from 0).
    """

    name: str
    token_ids: list[int]
    slots: list[torch.Tensor]
    positions: list[int] | None = None
    channels: list[int] | None = None
    last_positions: list[int] | None = None


def probe_dataset(
    folder: Path,
    target: str,
    samples: int = 4,
    engine: ProbeEngine = "auto",
    last: bool = True,
    dtype: Dtype | None = None,
    device: str = "auto",
) -> ProbeReport:
    """Says which of the target's states each slot of a store holds.

    Args:
        folder: of the store. With its manifest alone, or for a run or an exported checkpoint, only the fingerprint is
            compared.
        target: folder or hub id of the target.
        samples: how many samples to compute again, from the shortest to the longest, cut to 256 tokens.
        engine: `transformers` holds the whole target, `streamed` one layer at a time; `auto` streams what does not
            fit in memory.
        last: also check the last hidden states, which takes all layers; else one layer more than the highest captured.
        dtype: that the target computes in; default: as the extraction recorded, else the store's.
        device: see `TargetConfig`.

    Raises:
        ProblemsError: the store is damaged, the target cannot be loaded, or has another shape than the store says.
    """
    fingerprint, contract = load_fingerprint(folder)
    recorded = _recorded(folder)
    computed = dtype or recorded.get("dtype", "bfloat16" if contract.dtype == "float8_e4m3fn" else contract.dtype)
    config = TargetConfig(path=target, dtype=computed, device=device)
    files = find_target(config)
    different = compare_target(contract, files.facts)
    raise_problems([item for item in different if item.kind != "target.config_digest"], f"cannot probe {folder}")
    stored, notes = _stored(folder, fingerprint, contract, samples)
    depth = contract.num_hidden_layers if last else min(max(contract.wiring.boundaries) + 1, contract.num_hidden_layers)
    chosen = choose_engine(files, config) if engine == "auto" else engine
    reference = reference_states(files, config, chosen, depth, last, [item.token_ids for item in stored])
    coarse = coarser(computed, recorded.get("dtype", "bfloat16"))
    allowed = allowed_error(contract.dtype, coarse)
    measured = [measured_slots(item, states, contract, allowed) for item, states in zip(stored, reference, strict=True)]
    if "weights" in recorded and recorded["weights"] != weights_digest(files.folder):
        notes.append("note: the target's weight files are not those that the extraction recorded")
    if not last:
        notes.append("note: the last hidden states were not checked")
    return ProbeReport(
        where=str(folder),
        verdicts=diagnose(measured, allowed, coarser(contract.dtype, recorded.get("dtype", "bfloat16"))),
        num_hidden_layers=contract.num_hidden_layers,
        fixes=FIXES,
        others=different,
        notes=notes,
        facts={"target": target, "engine": chosen, "dtype": computed, "allowed_error": allowed},
    )


def _recorded(folder: Path) -> dict[str, str]:
    """What the extraction wrote down about its target: `weights` (a digest) and `dtype`."""
    if not (folder / MANIFEST_FILE).is_file():
        return {}
    settings = load_manifest(folder).settings.get("target")
    return settings if isinstance(settings, dict) else {}


def _stored(
    folder: Path, fingerprint: Fingerprint, contract: WiringContract, samples: int
) -> tuple[list[StoredStates], list[str]]:
    """What is to be compared, and notes on what is not."""
    printed = StoredStates(
        name=f"{fingerprint.sample} (fingerprint)",
        token_ids=list(fingerprint.token_ids),
        slots=[torch.tensor(rows) for rows in fingerprint.slots(contract)],
        positions=list(fingerprint.positions),
        channels=list(fingerprint.channels),
        last_positions=list(fingerprint.positions),
    )
    if not samples or not (folder / MANIFEST_FILE).is_file():
        return [printed], ["note: only the fingerprint was compared"]
    if not any((folder / shard.file).exists() for shard in load_manifest(folder).shards):
        return [printed], ["note: the store's shards are not here: only the fingerprint was compared"]
    reader = StoreReader(folder, allow_incomplete=True)
    return [printed, *(_read(reader, index) for index in _pick(reader, samples))], []


def _pick(reader: StoreReader, samples: int) -> list[int]:
    return pick_samples([sample.tokens for sample in reader.samples], samples)


def _read(reader: StoreReader, index: int) -> StoredStates:
    sample = reader.read(index)
    aux = sample.aux_hidden_states[:PROBED_TOKENS].split(reader.contract.hidden_size, dim=-1)
    last, places = sample.last_hidden_states[:PROBED_TOKENS], None
    if reader.layout.last_rows == "supervised":
        places = sample.loss_mask[:PROBED_TOKENS].nonzero().flatten().tolist()
        last = sample.last_hidden_states[: len(places)]
    slots = [*aux, last] if len(last) else list(aux)
    return StoredStates(sample.id, sample.input_ids[:PROBED_TOKENS].tolist(), slots, last_positions=places)


def reference_states(
    files: TargetFiles, config: TargetConfig, engine: ProbeEngine, depth: int, last: bool, batch: Sequence[list[int]]
) -> list[States]:
    """Every boundary up to `depth`, and the post-norm last hidden states if asked for, of each sample."""
    wiring = LayerWiring(tuple(range(EMBEDDING, depth)), files.facts.num_hidden_layers)
    if engine == "streamed":
        return _streamed_states(files, config, wiring, last, batch)
    result: list[States] = []
    for capture in TransformersEngine(load_model(files, config), files.spec, wiring, "post_norm").capture(batch):
        parts = capture.aux_hidden_states.chunk(wiring.num_aux, dim=-1)
        states: dict[Boundary, torch.Tensor] = dict(zip(wiring.boundaries, parts, strict=True))
        result.append({**states, POST_NORM: capture.last_hidden_states} if last else states)
    return result


def _streamed_states(
    files: TargetFiles, config: TargetConfig, wiring: LayerWiring, last: bool, batch: Sequence[list[int]]
) -> list[States]:
    """The same, reading the layers one at a time."""
    skeleton = Skeleton(files, getattr(torch, config.dtype), max(wiring.boundaries))
    section = StreamSection(chunk_tokens=sum(map(len, batch)))
    memory = plan_memory(skeleton, section, max(map(len, batch)), pick_device(config.device), Path(), greedy=False)
    kind: Literal["post_norm"] | None = "post_norm" if last else None
    engine = StreamedEngine(files, config, wiring, kind, memory.sizes, section.read_threads, skeleton=skeleton)
    with closing(engine) as streamed:
        found = streamed.states(batch)
    return [
        {POST_NORM if key == LAST else key + 1: rows for key, rows in states.items()}  # output index -> boundary
        for states in found
    ]


def measured_slots(stored: StoredStates, states: States, contract: WiringContract, allowed: float) -> list[Measured]:
    """How far each slot is from each of the target's states; see `measure`."""
    kind: Boundary = POST_NORM if contract.last_hidden_states == "post_norm" else contract.num_hidden_layers
    expected: list[tuple[str, Boundary]] = [(f"slot {slot}", at) for slot, at in enumerate(contract.wiring.boundaries)]
    if stored.channels is not None:
        states = {boundary: rows[:, stored.channels] for boundary, rows in states.items()}
    if POST_NORM in states:
        expected.append((LAST_SLOT, kind))
    rows = [*([stored.positions] * contract.wiring.num_aux), stored.last_positions]
    return [
        measure(name, boundary, found, states, allowed=allowed, sample=stored.name, found_rows=at)
        for (name, boundary), found, at in zip(expected, stored.slots, rows, strict=False)
    ]

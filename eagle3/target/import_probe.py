"""The proof, before anything is written, that a dump's states are those that its contract will name.

A few samples go through the target once more; each slot is compared with every boundary of the stack, as
`eagle3 wiring probe` does it. So a dump whose layers were numbered otherwise than its user thinks is found here, and
the layers that it does hold are named.

What it does not prove: that the samples which were not computed again are of the same layers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.data.chat import TokenSample
from eagle3.data.store_fingerprint import OtherStates, fingerprint_place, neighbours
from eagle3.draft.states import rounded
from eagle3.errors import raise_problems
from eagle3.target.capture import shards_by_size
from eagle3.target.engine_choice import choose_engine
from eagle3.target.head_tensors import has_all_weights
from eagle3.target.import_plan import ImportPlan
from eagle3.target.probe import LAST_SLOT, PROBED_TOKENS, States, StoredStates, measured_slots, reference_states
from eagle3.target.selfcheck import pick_samples
from eagle3.wiring.diagnosis import Verdict, allowed_error, coarser, diagnose
from eagle3.wiring.layers import describe_layers, to_boundary, to_output_index
from eagle3.wiring.probe_report import SENTENCES, ProbeReport

_NOTHING = "nothing was written"
_LAYERS = f"{_NOTHING}; check layers and numbering against how the dump was made, see docs/import.md"
_FIXES = {
    **dict.fromkeys(SENTENCES, _LAYERS),
    "precision": f"{_NOTHING}; give in target.dtype the type that made these states",
    "rows": f"{_NOTHING}; another sample or padding got into these: dump them again, one sample a pass",
    "padding": f"{_NOTHING}; dump them again, with padding on the right or masked out",
    "misaligned": f"{_NOTHING}; dump them again, row t with the state of token t",
    **dict.fromkeys(("other_weights", "other_target"), f"{_NOTHING}; give the target that made this dump"),
}


@dataclass(frozen=True)
class Probed:
    """What came of the probe.

    Attributes:
        right: the target was run, and every slot is right.
        said: in words.
        other_states: the neighbouring layers' states, for the store's fingerprint; None if the target was not run.
    """

    right: bool
    said: str
    other_states: OtherStates | None = None


def probe_dump(plan: ImportPlan) -> Probed:
    """Computes a few samples anew and compares; says so if it cannot.

    Raises:
        ProblemsError: kinds `probe.*`, one a cause, with the layers that the files hold.
    """
    if not plan.cfg.probe:
        return Probed(False, "not probed (probe=false): nothing shows that the layers are those that were named")
    if not has_all_weights(plan.files.folder):
        said = f"not probed: the target's weights are not all in {plan.files.folder}, so nothing shows its layers"
        return Probed(False, said)
    config, contract = plan.cfg.target, plan.contract
    print("probing: a few samples go through the target", file=sys.stderr)
    first = _fingerprint_sample(plan)
    chosen = pick_samples([tokens for _, tokens in plan.sample_tokens], plan.cfg.probe_samples)
    stored = [_stored(plan, index) for index in chosen]
    batch = [first, *(item.token_ids for item in stored)]
    engine = choose_engine(plan.files, config)
    states = reference_states(plan.files, config, engine, contract.num_hidden_layers, True, batch)
    allowed = allowed_error(contract.dtype, config.dtype)
    measured = [measured_slots(*item, contract, allowed) for item in zip(stored, states[1:], strict=True)]
    verdicts = diagnose(measured, allowed, coarser(contract.dtype, config.dtype))
    raise_problems(
        ProbeReport(plan.cfg.source, verdicts, contract.num_hidden_layers, _fixes(verdicts)).problems,
        f"the states in {plan.cfg.source} are not what was said",
    )
    said = f"every slot is right in the {len(chosen)} samples that were probed"
    return Probed(True, said, _others(plan, first, states[0]))


def _fingerprint_sample(plan: ImportPlan) -> list[int]:
    """The tokens that the store's fingerprint will be of: of a sample in the first shard."""
    shard = shards_by_size(plan.sizes, plan.cfg.shard_max_bytes, plan.cfg.shard_max_samples)[0]
    place = fingerprint_place([_tokens(plan, index) for index in shard], plan.layout)
    return list(place.token_ids)


def _tokens(plan: ImportPlan, index: int) -> TokenSample:
    raw = plan.read(index)
    assert raw.loss_mask is not None
    return TokenSample(plan.sample_tokens[index][0], raw.input_ids.tolist(), raw.loss_mask.bool().tolist())


def _others(plan: ImportPlan, first: Sequence[int], states: States) -> OtherStates:
    others = {index: states[to_boundary(index)].clone() for index in neighbours(plan.contract.wiring)}

    def other_states(tokens: Sequence[int]) -> Mapping[int, torch.Tensor]:
        assert list(tokens) == list(first), "the first shard's fingerprint is of another sample than was probed"
        return others

    return other_states


def _stored(plan: ImportPlan, index: int) -> StoredStates:
    raw, hidden, dtype = plan.read(index), plan.contract.hidden_size, plan.layout.dtype
    slots = [*raw.aux_hidden_states[:PROBED_TOKENS].split(hidden, dim=-1), raw.last_hidden_states[:PROBED_TOKENS]]
    ids = raw.input_ids[:PROBED_TOKENS].tolist()
    return StoredStates(plan.sample_tokens[index][0], ids, [rounded(slot, dtype) for slot in slots])


def _fixes(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """What to do; with the layers that the slots do hold, where they are known and ascend."""
    found: dict[str, set[object]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.measured.slot, set()).add(verdict.found)
    causes = {verdict.cause for verdict in verdicts if verdict.measured.slot == LAST_SLOT}
    fixes = {kind: f"{_NOTHING}; pass last_hidden_states={kind}" for kind in causes & {"post_norm", "pre_norm"}}
    del found[LAST_SLOT]
    held = [next(iter(boundaries)) for boundaries in found.values() if len(boundaries) == 1]
    indices = [to_output_index(boundary) for boundary in held if isinstance(boundary, int)]
    if len(indices) == len(found) and indices == sorted(set(indices)):
        fix = (
            f"{_NOTHING}; the files hold {describe_layers(indices)}: if you want to train on these, pass "
            f"'layers={indices}' numbering=output_index"
        )
        fixes |= dict.fromkeys(("one_early", "one_late", "embedding", "other_layer"), fix)
    return _FIXES | fixes

"""`eagle3 data import`: another trainer's hidden states, as a store.

Every file is read and checked, and a few samples are computed anew by the target, before the first byte is written.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.config import ImportConfig
from eagle3.data.store import StoredSample
from eagle3.data.store_check import is_complete
from eagle3.data.store_format import Manifest
from eagle3.target.head_tensors import read_head_tensors
from eagle3.target.import_plan import (
    ImportPlan,
    begun_manifest,
    check_room,
    keeps_fingerprint,
    make_import_plan,
)
from eagle3.target.import_probe import Probed, probe_dump
from eagle3.target.write import completing, open_store, write_missing
from eagle3.wiring.layers import describe_layers

_PROBED = "probed"


@dataclass(frozen=True)
class ImportReport:
    """What is in the store now.

    Attributes:
        output: its folder.
        samples, tokens, supervised_tokens: in the store.
        imported: samples that this run added.
        left_out: other samples of the dump, by the kind of what bars them, or that they have no supervised token.
        layers, last_hidden_states, dtype: of its states, in words.
        probed: what came of the probe, in words.
        dry: nothing was to be written.
    """

    output: str
    samples: int
    tokens: int
    supervised_tokens: int
    imported: int
    left_out: Counter[str]
    layers: str
    last_hidden_states: str
    dtype: str
    probed: str
    dry: bool = False

    def render(self) -> str:
        counts = f"{self.samples:,} samples, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised"
        done = "dry run: nothing was written" if self.dry else f"{self.imported:,} samples imported by this run"
        lines = [f"{self.output}: {counts}; {done}"]
        lines += [f"{count:,} samples left out: {kind}" for kind, count in sorted(self.left_out.items())]
        lines += [f"{self.layers}; {self.last_hidden_states} last hidden states; {self.dtype}", self.probed]
        return "\n".join(lines)


def run_import(cfg: ImportConfig, dry: bool = False) -> ImportReport:
    """Imports what is missing in `cfg.output`.

    Args:
        dry: check and probe everything, and write nothing.

    Raises:
        ProblemsError: source, layers, target, masks, disk or an earlier run's store do not fit; without `skip_bad`,
            every sample that cannot be imported; the probe found other states than were named. Nothing was written
            then.
    """
    plan = make_import_plan(cfg)
    begun = begun_manifest(plan)
    check_room(plan)
    complete = begun is not None and is_complete(plan.folder, begun, (name for name, _ in plan.sample_tokens))
    earlier = _probed_before(begun) if begun is not None and (complete or keeps_fingerprint(plan, begun)) else None
    probed = earlier or probe_dump(plan)
    print(probed.said, file=sys.stderr)
    return _report(plan, 0 if dry or complete else _write(plan, probed), probed, dry)


def _probed_before(begun: Manifest) -> Probed | None:
    """What the probe said when the import began, if it ran."""
    told = begun.provenance.get(_PROBED)
    return Probed(True, str(told.get("said"))) if isinstance(told, dict) and told.get("right") is True else None


def _write(plan: ImportPlan, probed: Probed) -> int:
    recorded = {"right": probed.right, "said": probed.said}
    told = {_PROBED: recorded, "left_out": dict(plan.scan.left_out), "dump": str(plan.dump.folder.resolve())}
    tensors = read_head_tensors(plan.files, plan.cfg.target)
    with open_store(plan, tensors, probed.other_states, told) as writer:
        return write_missing(plan, writer, lambda missing: _read(plan, missing), completing(plan, tensors), "import")


def _read(plan: ImportPlan, missing: Sequence[int]) -> Iterator[tuple[int, StoredSample]]:
    for index in missing:
        raw = plan.read(index)
        assert raw.loss_mask is not None
        yield (
            index,
            StoredSample(
                id=plan.sample_tokens[index][0],
                input_ids=raw.input_ids,
                loss_mask=raw.loss_mask.bool(),
                aux_hidden_states=raw.aux_hidden_states.to(plan.layout.value_dtype),
                last_hidden_states=raw.last_hidden_states.to(plan.layout.value_dtype),
            ),
        )


def _report(plan: ImportPlan, imported: int, probed: Probed, dry: bool) -> ImportReport:
    return ImportReport(
        output=plan.cfg.output,
        samples=len(plan.scan.found),
        tokens=plan.scan.tokens,
        supervised_tokens=plan.scan.supervised,
        imported=imported,
        left_out=plan.scan.left_out,
        layers=describe_layers(plan.contract.output_indices),
        last_hidden_states=plan.contract.last_hidden_states,
        dtype=plan.contract.dtype,
        probed=probed.said,
        dry=dry,
    )

"""What a probe found, as problems and as a table: one line for all samples in which a slot holds the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eagle3.errors import Problem
from eagle3.wiring.diagnosis import POST_NORM, ROUNDING, Boundary, Verdict
from eagle3.wiring.layers import to_output_index
from eagle3.wiring.report import aligned, render_json, render_text

SENTENCES = {
    "one_early": "{slots} {holds} {found}, expected {expected}: one layer early",
    "one_late": "{slots} {holds} {found}, expected {expected}: one layer late",
    "embedding": "{slots} {holds} the embedding, expected {expected}",
    "other_layer": "{slots} {holds} {found}, expected {expected}: another layer",
    "permuted": "the slots are permuted: {slots} {holds} {found}, expected {expected}",
    "post_norm": "{slots} {holds} {found}, expected {expected}",
    "pre_norm": "{slots} {holds} {found}, expected {expected}",
    "misaligned": "row t of {slots} holds {found} of token t{tokens:+d}, expected {expected} of token t",
    "rows": "{slots}: the states of {which} are wrong, the others right: padding or another sample got in",
    "padding": "{slots}: the first tokens are far off and later ones ever closer: they attended to padding before them",
    "precision": "{slots} {holds} {expected}, but as {precision} values: that rounding takes up to {bound:.2%}",
    "other_weights": "{slots} {holds} {expected}, as expected, but of other weights: no rounding explains the error",
    "other_states": "{slots} {holds} other states than {expected}: another layer, or another model or its weights",
    "other_target": "{slots} {holds} nothing of this target: other model, weights or tokens, or much padding",
}


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        where: the dataset, checkpoint or server that was probed.
        verdicts: on each slot of each sample.
        num_hidden_layers: N of the target.
        fixes: what to do, by cause.
        others: problems besides the verdicts.
        notes: what a user should know.
        facts: how it was probed, for the JSON report.
    """

    where: str
    verdicts: Sequence[Verdict]
    num_hidden_layers: int
    fixes: Mapping[str, str]
    others: Sequence[Problem] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] | None = None

    @property
    def problems(self) -> list[Problem]:
        """One problem for each cause, in words, with the slots and samples it was seen in; kinds `probe.<cause>`."""
        return [*self.others, *self._problems()]

    def render(self, as_json: bool = False) -> str:
        """The problems, the table and the notes."""
        problems = self.problems
        if as_json:
            verdicts = [verdict.to_dict() for verdict in self.verdicts]
            return render_json(
                problems, where=self.where, **(self.facts or {}), notes=list(self.notes), verdicts=verdicts
            )
        return "\n".join([render_text(problems, f"{self.where}: every slot is right"), *self._table(), *self.notes])

    def _table(self) -> list[str]:
        rows = [("slot", "expected", "holds", "error", "next", "type", "samples", "verdict")]
        for group in _grouped(self.verdicts, lambda item: (item.measured.slot, item.cause, item.found)):
            verdict, found = group[0], group[0].found
            rows.append(
                (
                    verdict.measured.slot,
                    self._short(verdict.measured.expected),
                    "-" if found is None else self._short(found),
                    _percent(median(item.error for item in group)),
                    _percent(median(item.next_error for item in group)),
                    verdict.measured.precision,
                    str(len(group)),
                    verdict.cause.replace("_", " "),
                )
            )
        return aligned(rows)

    def _problems(self) -> list[Problem]:
        wrong = [item for item in self.verdicts if item.cause != "right"]
        total = len({item.measured.sample for item in self.verdicts})
        problems = []
        for group in _grouped(wrong, lambda item: (item.cause, item.tokens)):
            slots = list({item.measured.slot: item for item in group}.values())
            samples = sorted({item.measured.sample for item in group})
            error, other = (median(values) for values in zip(*((i.error, i.next_error) for i in group), strict=True))
            evidence = f"error {_percent(error)}, {_percent(other)} for the next closest"
            if total > 1:
                evidence += f"; in {len(samples)} of {total} samples: {', '.join(samples)}"
            text = f"{self._sentence(slots)} ({evidence})"
            problems.append(Problem(self.where, f"probe.{group[0].cause}", text, self.fixes[group[0].cause]))
        return problems

    def _sentence(self, slots: Sequence[Verdict]) -> str:
        first = slots[0]
        return SENTENCES[first.cause].format(
            slots=_joined([item.measured.slot for item in slots]),
            holds="holds" if len(slots) == 1 and not first.measured.slot.endswith("s") else "hold",
            found=self._long([item.found for item in slots if item.found is not None]),
            expected=self._long([item.measured.expected for item in slots]),
            tokens=first.tokens,
            which=_which(first),
            precision=first.measured.precision,
            bound=ROUNDING[first.measured.precision],
        )

    def _long(self, boundaries: Sequence[Boundary]) -> str:
        """In words, e.g. `the outputs of layers 2, 30, 58 and the last hidden states (post-norm)`."""
        layers = [
            str(to_output_index(boundary)) for boundary in boundaries if isinstance(boundary, int) and boundary > 0
        ]
        parts = ["the embedding"] * (0 in boundaries)
        if boundaries == [self.num_hidden_layers]:
            parts.append(f"the output of the last layer, {layers[0]}, before the final norm (pre-norm)")
        elif layers:
            plural = "s" * (len(layers) > 1)
            parts.append(f"the output{plural} of layer{plural} {', '.join(layers)}")
        parts += ["the last hidden states (post-norm)"] * (POST_NORM in boundaries)
        return " and ".join(parts)

    def _short(self, boundary: Boundary) -> str:
        if boundary == POST_NORM:
            return "post-norm"
        assert isinstance(boundary, int)
        name = f"layer {to_output_index(boundary)}" if boundary else "embedding"
        return f"{name} (pre-norm)" if boundary == self.num_hidden_layers else name


def _grouped(verdicts: Sequence[Verdict], key: Any) -> list[list[Verdict]]:
    groups: dict[Any, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(key(verdict), []).append(verdict)
    return list(groups.values())


def _percent(value: float) -> str:
    if value == float("inf"):
        return "-"
    return f"{value:.2%}" if value >= 1e-4 or not value else f"{value:.0e}"


def _which(verdict: Verdict) -> str:
    if verdict.rows is None:
        return ""
    first, end = verdict.rows
    last = max(verdict.measured.row_errors)
    if end - first == 1:
        return f"token {first}"
    return f"token {first} and all after it" if end > last else f"tokens {first} to {end - 1}"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""The sample table: what the drafter does on a few held-out samples, at each evaluation.

In text where the target's tokenizer is at hand (the config's `target`, or on this machine under the path that
extraction recorded), else in ids. Nothing is downloaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle3.config import TargetConfig, TrainConfig
from eagle3.data.show.printable import printable
from eagle3.data.store import StoreReader
from eagle3.data.store_format import load_manifest
from eagle3.data.store_inspect import recorded_target
from eagle3.draft.ttt import TTTLoss
from eagle3.errors import ProblemsError
from eagle3.evaluate.shown import Shown, show
from eagle3.target.resolve import find_target
from eagle3.train.engines.base import Ranks
from eagle3.train.evaluation import ACCEPTANCE_STEPS
from eagle3.train.samples import SampleSet

COLUMNS = ["step", "sample", "prompt ends", "answer", "rounds", "acceptance length"]
"""Of the table in Weights & Biases."""

Decode = Callable[[list[int]], str]
Row = dict[str, Any]
"""A sample at an evaluation, as `samples.jsonl` has it: `Shown.to_dict` and its texts."""


class SampleTable:
    """Shows the same held-out samples each time; without any, as on processes that do not log, nothing.

    Attributes:
        notes: what a user should know, a line each.
    """

    def __init__(self, config: TrainConfig, samples: SampleSet | None) -> None:
        count = 0 if samples is None else min(config.tracking.samples, len(samples.indices))
        self.notes: list[str] = []
        self._samples = samples if count else None
        if self._samples is not None:
            given = self._samples.indices
            self._indices = [given[number * len(given) // count] for number in range(count)]
            self._decode = self._find_decoder(config, self._samples.reader)

    def rows(self, module: TTTLoss, ranks: Ranks) -> list[Row]:
        """One of each sample that has a round.

        Args:
            module: with whole parameters.
        """
        if self._samples is None:
            return []
        steps, found = min(ACCEPTANCE_STEPS, module.ttt.steps), []
        groups = [[index] for index in self._indices]
        with self._samples.reader.ahead(groups) as done, ranks.autocast():
            for index in self._indices:
                sample = self._samples.reader.read(index)
                done(1)
                shown = show(module.model, sample, module.vocab, steps, self._samples.max_length)
                if shown is not None:
                    found.append(self._row(shown))
        return found

    def _row(self, shown: Shown) -> Row:
        decode, answer, lines = self._decode, self._decode([shown.first]), []
        for item in shown.rounds:
            accepted = f"⟦{decode(item.accepted)}⟧" if item.accepted else ""
            own = "" if item.own is None else decode([item.own])
            answer += accepted + own
            missed = "" if item.missed is None else f", not {decode([item.missed])!r}"
            lines.append(f"{len(item.accepted)} accepted: {accepted}{own}{missed}")
        texts = {"prompt_text": decode(shown.prompt), "answer_text": answer, "round_texts": lines}
        return {**shown.to_dict(), **texts, "acceptance_length": round(shown.length, 4)}

    def _find_decoder(self, config: TrainConfig, reader: StoreReader) -> Decode:
        contract, recorded = reader.contract, recorded_target(load_manifest(reader.folder))
        try:
            target = config.target or TargetConfig(path=recorded or contract.target_name)
            folder = find_target(target, weights=False, download=False).folder
            from eagle3.data.chat import load_tokenizer, tokenizer_digest  # seconds, for runs that show text

            tokenizer = load_tokenizer(str(folder), trust_remote_code=target.trust_remote_code)
        except ValueError as error:  # a recorded path may be no path at all
            found = error.problems[0] if isinstance(error, ProblemsError) else None
            reason = f"{found.where}: {found.message}" if found else f"{recorded!r} is no path"
            if found is not None and found.kind == "target.not_found":
                reason = f"{found.where} is no folder here, and not in the hub's cache"
        else:
            if tokenizer_digest(tokenizer) == contract.tokenizer_digest:
                return lambda ids: printable(str(tokenizer.decode(ids)))
            reason = f"the tokenizer in {folder} is not the dataset's"
        self.notes.append(f"note: samples are shown as token ids: {reason}; set `target` to see text")
        return _spell_ids


def _spell_ids(ids: list[int]) -> str:
    return "".join(f" {token}" for token in ids)


def render(step: int, rows: Sequence[Row]) -> str:
    """Markdown of one evaluation's rows; texts are indented, so that no mark in them counts."""
    lines = [
        f"# Held-out samples at step {step}",
        "",
        "What is in ⟦ ⟧ was drafted and accepted, all else of the answer came from the target, one token a round.",
    ]
    for row in rows:
        lines += ["", f"## {row['sample']}: {row['acceptance_length']:.2f} tokens a round", ""]
        lines += [f"    {line}" for line in ["prompt ends:", *_lines(row["prompt_text"]), "", "answer:"]]
        lines += [f"    {line}" for line in [*_lines(row["answer_text"]), "", "rounds:"]]
        for number, text in enumerate(row["round_texts"], start=1):
            lines.append(f"    {number:3} {' '.join(_lines(text))}")
    return "\n".join(lines) + "\n"


def columns(step: int, rows: Sequence[Row]) -> list[list[Any]]:
    """The same as values of `COLUMNS`."""
    return [
        [
            step, row["sample"], row["prompt_text"], row["answer_text"], "\n".join(row["round_texts"]),
            row["acceptance_length"],
        ]
        for row in rows
    ]  # fmt: skip


def _lines(text: str) -> list[str]:
    return text.split("\n")

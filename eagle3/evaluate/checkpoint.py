"""Acceptance of a checkpoint on a held-out hidden-state store, before any server is started."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.config import CacheSection
from eagle3.data.open_reader import open_reader
from eagle3.data.show.printable import printable_name
from eagle3.data.target_argmax import make_target_head
from eagle3.errors import problem_error, raise_problems
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.result import AcceptanceResult
from eagle3.evaluate.sampling import Sampling
from eagle3.progress import progress
from eagle3.serve.saved_draft import SavedDraft, load_exported, load_run
from eagle3.train.checkpoint import WEIGHTS_FILE, checkpoints_folder
from eagle3.wiring.targets import CONFIG_FILE


@dataclass(frozen=True)
class EvaluationReport:
    """Acceptance of one checkpoint on one store."""

    checkpoint: str
    dataset: str
    result: AcceptanceResult

    def render(self) -> str:
        """A small table: acceptance by drafts a round, then how far the rounds got."""
        result = self.result
        head = f"{self.checkpoint} on {self.dataset}: {result.samples} samples, {result.committed} tokens"
        if not result.rounds:
            return f"{head}\n  no data: no answer is longer than one token"
        titles = f"{'drafts':>8}{'acceptance length':>19}{'95% interval':>18}{'rate':>8}"
        lines = [head, f"{titles}{'step accuracy':>15}{'accepted there':>16}"]
        for item, accuracy, accepted in zip(result.by_steps, result.step_accuracy, result.by_depth, strict=True):
            spread = f"{item.interval[0]:.3f} to {item.interval[1]:.3f}"
            numbers = f"{item.steps:>8}{item.length:>19.3f}{spread:>18}{item.rate:>8.1%}"
            lines.append(f"{numbers}{_share(accuracy):>15}{_share(accepted):>16}")
        shares = (f"{accepted}: {count / result.rounds:.1%}" for accepted, count in enumerate(result.histogram))
        low, high = result.interval
        return "\n".join(
            [
                *lines,
                f"  rounds by accepted drafts: {', '.join(shares)}",
                f"  {result.steps} drafts a round: acceptance length {result.length:.3f} (95% interval {low:.3f} to "
                f"{high:.3f}), acceptance rate {result.rate:.1%}",
                *(
                    f"  {printable_name(name)}: acceptance length {found.length:.3f} (95% interval "
                    f"{found.interval[0]:.3f} to {found.interval[1]:.3f}; {found.samples} samples, "
                    f"{found.rounds} rounds)"
                    for name, found in result.by_source.items()
                    if found.rounds
                ),
                *self._sampling_lines(),
            ]
        )

    def _sampling_lines(self) -> list[str]:
        found = self.result.sampling
        if found is None:
            return []
        lines = [
            f"  sampling at temperature {found.temperature:g}, expected:",
            f"{'drafts':>8}{'acceptance length':>19}{'95% interval':>18}{'of this text':>14}{'min(p, q)':>11}",
        ]
        for drafts, (length, (low, high), own, accepted) in enumerate(
            zip(found.lengths, found.intervals, found.of_text, found.accepted, strict=True), 1
        ):
            spread = f"{low:.3f} to {high:.3f}"
            lines.append(f"{drafts:>8}{length:>19.3f}{spread:>18}{own:>14.3f}{_share(accepted):>11}")
        return lines

    def to_json(self) -> str:
        """Everything; see docs/schemas/evaluation.schema.json. `eagle3 serve plan` reads it."""
        value = {
            "format": "eagle3-evaluation",
            "format_version": 1,
            "checkpoint": self.checkpoint,
            "dataset": self.dataset,
            **asdict(self.result),
        }
        return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """JSON has no NaN: what has no data is null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _share(value: float) -> str:
    return "no data" if math.isnan(value) else f"{value:.1%}"


def evaluate_checkpoint(
    checkpoint: Path | str,
    dataset: Path | str,
    steps: int,
    cache: CacheSection | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> EvaluationReport:
    """Acceptance of a run's checkpoint or an exported folder on a store of the same target and layers.

    The embedding is taken from the store's target head, as a server takes the target's. Runs on the first GPU in
    bfloat16 where there is one, else on the CPU in float32.

    Args:
        checkpoint: a run folder (its best checkpoint), one of its checkpoint folders, or an exported folder.
        dataset: folder or URL of the hidden-state store, of samples that were not trained on.
        steps: most drafts a round; also more than were trained.
        cache: of a store elsewhere.
        temperature: above 0; reckon what sampling at it would accept, too.
        seed: of the resampling behind the intervals.

    Raises:
        ProblemsError: the checkpoint is damaged; its contract and the store's differ in more than the states' type
            (every difference is listed).
    """
    draft, reader = load_draft(checkpoint), open_reader(dataset, cache)
    names = f"checkpoint {checkpoint}", f"dataset {dataset}"
    differences = draft.contract.compare(reader.contract, *names, any_dtype=True)
    raise_problems(differences, f"cannot evaluate {checkpoint} on {dataset}")
    tensors = reader.target_head()
    model = draft.model(tensors["embed_tokens.weight"])
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    device = model.lm_head.weight.device
    sampling = None
    if temperature is not None:
        head = make_target_head(tensors, reader.target_config, reader.contract.last_hidden_states)
        sampling = Sampling(head.to(device), temperature)
    with progress("evaluate", len(reader), "samples") as advance:
        result = acceptance(model, reader, draft.vocab.to(device), steps, advance=advance, sampling=sampling, seed=seed)
    return EvaluationReport(str(checkpoint), str(dataset), result)


def load_draft(checkpoint: Path | str) -> SavedDraft:
    """Reads an exported folder, a run's best checkpoint, or one of a run's checkpoint folders.

    Raises:
        ProblemsError: it is none of these, or it is damaged.
    """
    checkpoint = Path(checkpoint)
    if (checkpoint / WEIGHTS_FILE).is_file():
        return load_run(checkpoint.resolve().parent.parent, checkpoint.resolve().name)
    if checkpoints_folder(checkpoint).is_dir():
        return load_run(checkpoint)
    if (checkpoint / CONFIG_FILE).is_file():
        return load_exported(checkpoint)
    message = "is neither a run, nor a run's checkpoint, nor an exported folder"
    raise problem_error(str(checkpoint), "evaluate.checkpoint", message, "check the path")

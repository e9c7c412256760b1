"""Acceptance of a checkpoint on a held-out hidden-state store, before any server is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.config import CacheSection
from eagle3.data.open_reader import open_reader
from eagle3.data.show.printable import printable_name
from eagle3.errors import problem_error, raise_problems
from eagle3.evaluate.acceptance import AcceptanceResult, acceptance
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
        """A small table: acceptance length by drafts a round, then how far the rounds got."""
        result = self.result
        head = f"{self.checkpoint} on {self.dataset}: {result.samples} samples, {result.committed} tokens"
        if not result.rounds:
            return f"{head}\n  no data: no answer is longer than one token"
        lines = [head, f"{'drafts':>8}{'acceptance length':>20}{'step accuracy':>16}{'accepted there':>17}"]
        for drafts, length, accuracy, accepted in zip(
            range(1, result.steps + 1), result.length_by_steps, result.step_accuracy, result.by_depth, strict=True
        ):
            lines.append(f"{drafts:>8}{length:>20.3f}{_share(accuracy):>16}{_share(accepted):>17}")
        shares = (f"{accepted}: {count / result.rounds:.1%}" for accepted, count in enumerate(result.histogram))
        low, high = result.interval
        return "\n".join(
            [
                *lines,
                f"  rounds by accepted drafts: {', '.join(shares)}",
                f"  {result.steps} drafts a round: acceptance length {result.length:.3f} (95% interval {low:.3f} to "
                f"{high:.3f}), acceptance rate {result.rate:.1%}",
                *(
                    f"  {printable_name(name)}: acceptance length {found.length:.3f} ({found.samples} samples, "
                    f"{found.rounds} rounds)"
                    for name, found in result.by_source.items()
                    if found.rounds
                ),
            ]
        )


def _share(value: float) -> str:
    return "no data" if math.isnan(value) else f"{value:.1%}"


def evaluate_checkpoint(
    checkpoint: Path | str, dataset: Path | str, steps: int, cache: CacheSection | None = None
) -> EvaluationReport:
    """Acceptance of a run's checkpoint or an exported folder on a store of the same target and layers.

    The embedding is taken from the store's target head, as a server takes the target's. Runs on the first GPU in
    bfloat16 where there is one, else on the CPU in float32.

    Args:
        checkpoint: a run folder (its best checkpoint), one of its checkpoint folders, or an exported folder.
        dataset: folder or URL of the hidden-state store, of samples that were not trained on.
        steps: drafts a round.
        cache: of a store elsewhere.

    Raises:
        ProblemsError: the checkpoint is damaged; its contract and the store's differ in more than the states' type
            (every difference is listed).
    """
    draft, reader = load_draft(checkpoint), open_reader(dataset, cache)
    names = f"checkpoint {checkpoint}", f"dataset {dataset}"
    differences = draft.contract.compare(reader.contract, *names, any_dtype=True)
    raise_problems(differences, f"cannot evaluate {checkpoint} on {dataset}")
    model = draft.model(reader.target_head()["embed_tokens.weight"])
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    vocab = draft.vocab.to(model.lm_head.weight.device)
    with progress("evaluate", len(reader), "samples") as advance:
        result = acceptance(model, reader, vocab, steps, advance=advance)
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

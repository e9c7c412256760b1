"""`eagle3 train --plan`: what device memory a run takes, before anything is written and without a step.

The ledgers are `eagle3.draft.fused.memory` and `eagle3.train.memory`; docs/training.md says what they were held
against.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.config import TrainConfig
from eagle3.draft.config import TTTSettings
from eagle3.draft.fused.ledger import GROUPS, Phase
from eagle3.draft.fused.memory import Types
from eagle3.draft.states import FP8
from eagle3.errors import Problem, raise_problems
from eagle3.files import is_url, size_text
from eagle3.train.balance import balance_notes
from eagle3.train.engine import asked_for
from eagle3.train.float8 import check_float8
from eagle3.train.memory import Run, evaluation_bytes
from eagle3.train.samples import Samples
from eagle3.train.setup import open_samples, planned_shape, ttt_settings
from eagle3.train.worst_batch import Worst, find_worst, largest
from eagle3.wiring.report import aligned

_CONTEXT = 1 << 30
"""Bytes left for CUDA's context, its libraries and the kernels: an allowance, not a measurement."""
_SPARE = 0.05
"""Share of the peak left for gaps between the allocator's blocks and what the ledger misses."""
_RING_SECONDS = 0.1
_GRAIN, _MOST_TOKENS = 256, 1 << 20
_MOST_GIB, _MOST_DIGITS = 1 << 20, 5
_PHASES: dict[Phase, str] = {
    "count": "counting terms and reading the teacher",
    "fuse": "fusing the captured layers",
    "share": "computing what chunks share",
    "forward": "a chunk's steps forward",
    "head": "a chunk's head and loss",
    "backward": "a chunk's steps backward",
    "sums": "a chunk's weight gradients",
    "finish": "backward through what chunks share",
    "autograd": "backward through fc",
    "update": "the optimiser's step",
}


@dataclass(frozen=True)
class Card:
    """A card's memory, in bytes.

    Attributes:
        name: what it is, in words.
        free: what this run may have of it, CUDA's context included.
    """

    name: str
    free: int

    def left(self, peak: int) -> int:
        """Bytes that nobody uses where blocks take so many; below 0, it does not fit."""
        return int(self.free - _CONTEXT - peak * (1 + _SPARE))

    def holds(self, peak: int) -> bool:
        return self.left(peak) >= 0


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes, and whether that fits.

    Attributes:
        cached: whether datasets at URLs were read, through the cache.
    """

    lines: Sequence[str]
    problems: Sequence[Problem]
    cached: bool = False

    def render(self) -> str:
        but = " but the cache of the store at a URL" if self.cached else ""
        return "\n".join([*self.lines, *map(str, self.problems), f"plan: nothing was written{but}"])


def plan_memory(config: TrainConfig, device_memory: float | None = None) -> MemoryPlan:
    """Plans a run; reads the dataset's lengths and some of its loss masks, and writes nothing but the
    cache of a store at a URL.

    Args:
        device_memory: of the card, in GiB; None asks the first GPU.

    Raises:
        ProblemsError: kinds `plan.autograd`, `plan.precision`, `plan.engine`, `plan.device`: this is not modelled;
            `plan.processes`; `train.float8`: a product cannot be made; whatever is wrong with the dataset or the
            drafter's shape.
    """
    card, problems = find_card(device_memory)
    processes, wrong = find_processes(os.environ)
    raise_problems(_not_modelled(config) + _other_engine(os.environ) + problems + wrong, "cannot plan")
    assert card is not None
    if config.ring is not None:  # a plan waits for nobody
        config = config.model_copy(update={"ring": config.ring.model_copy(update={"wait_seconds": _RING_SECONDS})})
    samples = open_samples(config, processes)
    run = make_run(config, samples, ttt_settings(config), processes)
    if run.ttt.float8:  # of a card that is not here, only its memory is known
        device = torch.device("cuda" if device_memory is None else "cpu")
        raise_problems(check_float8(run.draft, config.mixed_precision, device), "cannot train in float8")
    worst = find_worst(samples.train, config, run)
    balance = balance_notes(samples.train.feed(config, processes, run.cost)) if processes > 1 else []
    evaluation = _evaluation(run, samples, config.eval_depths)
    most = _most_tokens(samples, config, run, card)
    problems = list(_too_large(config, card, worst.bound, evaluation, most))
    lines = [*_head_lines(config, run), *samples.notes, *balance, *_batch_lines(worst), *_table(worst)]
    lines += [f"no micro-batch can take more than {size_text(worst.bound)}"]
    if samples.heldout is not None:
        lines.append(f"an evaluation takes about {size_text(evaluation)}: every sample's attention scores at once")
    more = "; NCCL takes more, which is not counted" if processes > 1 else ""
    lines.append(
        f"card: {card.name}; {size_text(_CONTEXT)} of it are left for CUDA's context and the kernels, and {_SPARE:.0%} "
        f"of the peak for gaps between blocks{more}"
    )
    if not problems:
        lines.append(f"it fits: {size_text(card.left(max(worst.bound, evaluation)))} to spare")
    lines.append(_most_line(most, config))
    cached = any(map(is_url, filter(None, (config.dataset, config.eval_dataset))))
    return MemoryPlan(lines, problems, cached)


def find_card(device_memory: float | None) -> tuple[Card | None, list[Problem]]:
    """The card of `--device-memory`, else the first GPU."""
    if device_memory is not None:
        if not 0 < device_memory <= _MOST_GIB:  # not true of NaN
            message = f"is {device_memory:g}, expected a card's memory in GiB, above 0 and at most {_MOST_GIB:,}"
            return None, [Problem("--device-memory", "plan.device", message, "pass e.g. --device-memory 140")]
        return Card(f"{device_memory:g} GiB, as --device-memory says", int(device_memory * 2**30)), []
    if not torch.cuda.is_available():
        message = "there is no GPU here to ask for its memory, and a run on a CPU is not modelled"
        return None, [Problem("--plan", "plan.device", message, "name the card's memory: --device-memory GIB")]
    free, total = torch.cuda.mem_get_info()
    return Card(f"{torch.cuda.get_device_name()}, {size_text(free)} of {size_text(total)} free", free), []


def find_processes(environment: Mapping[str, str]) -> tuple[int, list[Problem]]:
    """How many processes a launcher started."""
    text = environment.get("WORLD_SIZE", "1")
    if text.isdecimal() and len(text) <= _MOST_DIGITS and int(text):
        return int(text), []
    message = f"is {text!r:.40}, expected the number of processes, 1 to {10**_MOST_DIGITS - 1:,}"
    return 1, [Problem("WORLD_SIZE", "plan.processes", message, "let a launcher set it, set it, or unset it")]


def make_run(config: TrainConfig, samples: Samples, ttt: TTTSettings, processes: int) -> Run:
    """What the memory of a run depends on, its micro-batches aside; loads no weights.

    Raises:
        ProblemsError: the drafter cannot have this shape, or the one in `init_from` does not fit.
    """
    reader = samples.train.reader
    draft = planned_shape(config, reader)
    head = reader.target_head()["lm_head.weight"].element_size()
    states = getattr(torch, reader.contract.dtype)
    types = Types(
        head=head, states=states.itemsize, scaled=states == FP8, float8=ttt.float8, argmax=samples.have_argmax
    )
    return Run(draft, ttt, types, processes, config.optim.kept)


def _not_modelled(config: TrainConfig) -> list[Problem]:
    problems = []
    if config.ttt.chunk is None:
        message = "is null: the step by autograd, whose memory is not modelled (it keeps every chain's rows at once)"
        fix = "give ttt.chunk a number (2304 is the default), which also bounds the memory"
        problems.append(Problem("ttt.chunk", "plan.autograd", message, fix))
    if config.mixed_precision != "bf16":
        message = (
            f"is {config.mixed_precision}: only bfloat16 has the GPU kernels that are modelled; the plain attention "
            "keeps a matrix of scores for every query head"
        )
        problems.append(Problem("mixed_precision", "plan.precision", message, "pass mixed_precision=bf16"))
    return problems


def _other_engine(environment: Mapping[str, str]) -> list[Problem]:
    message = "asks for {}: only what one process or DDP takes is modelled, which is more"
    fix = "plan with configs/accelerate/ddp.yaml; docs/training.md says what shards save"
    return [
        Problem("accelerate config", "plan.engine", message.format(engine), fix) for engine in asked_for(environment)
    ]


def _evaluation(run: Run, samples: Samples, depths: int | None) -> int:
    if samples.heldout is None:
        return 0
    infos = map(samples.heldout.info, range(len(samples.heldout.indices)))
    return evaluation_bytes(run, [(info.tokens, info.supervised) for info in infos], depths)


def _most_tokens(samples: Samples, config: TrainConfig, run: Run, card: Card) -> int:
    """The largest `batch_tokens`, in steps of `_GRAIN`, with which every micro-batch surely fits; 0 if none does."""

    def fits(grains: int) -> bool:
        update = {"batch_tokens": grains * _GRAIN, "batch_size": 1, "pack": False}
        _, batches = largest(samples.train, config.model_copy(update=update), run)
        return card.holds(batches[0].bound(run).peak)

    low = -(-config.max_length // _GRAIN)
    high = max(low, _MOST_TOKENS // _GRAIN)
    if not fits(low):
        return 0
    if fits(high):
        return high * _GRAIN
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _GRAIN


def _head_lines(config: TrainConfig, run: Run) -> Iterator[str]:
    counts = run.draft.parameter_counts()
    yield (
        f"drafter: {counts['total']:,} parameters, {counts['trainable']:,} of them trained; float32 weights, "
        f"{config.mixed_precision} autocast{', products in float8' if run.ttt.float8 else ''}, {run.moments} moments, "
        f"ttt.chunk {run.ttt.chunk}, accumulate {config.accumulate}, {run.processes} process(es)"
    )


def _batch_lines(worst: Worst) -> Iterator[str]:
    batch, sizes = worst.batch, worst.sizes
    yield (
        f"{worst.count:,} micro-batches of all processes"
        + (f"; the loss masks of the {worst.read} that may take most were read" if worst.read else "")
    )
    chunks = f"{len(sizes.chunks)} chunk(s) of at most {max((counts[0] for counts in sizes.chunks), default=0):,}"
    found = "the largest" if worst.read else "the largest, at most (a ring's loss masks are not known before)"
    yield (
        f"{found}: {batch.tokens:,} tokens in {len(batch.rows)} row(s), {sizes.supervised:,} of them supervised; "
        f"{sizes.chains:,} chains, {chunks}, which read {sizes.sources:,} tokens"
    )


def _table(worst: Worst) -> list[str]:
    """Bytes of each group at the peak and in the optimiser's step."""
    ledger, peak = worst.ledger, worst.ledger.phase
    at_peak, at_update = ledger.groups(peak), ledger.groups("update")
    table = [("", "at the peak", "in the optimiser's step")]
    for group in GROUPS:
        if at_peak[group] or at_update[group]:
            table.append((group, size_text(at_peak[group]), size_text(at_update[group])))
            parts = [entry for entry in ledger.entries if entry.group == group and group in _SHOWN and entry.size]
            for entry in parts if len(parts) > 1 else ():
                first, second = (entry.size if phase in entry.phases else 0 for phase in (peak, "update"))
                if first or second:
                    table.append((f"  {entry.name}", size_text(first), size_text(second)))
    table.append(("together", size_text(ledger.peak), size_text(ledger.at("update"))))
    return [*aligned(table), f"the peak is in {_PHASES[peak]}"]


_SHOWN = ("weights", "gradients", "batch", "teacher")
"""Groups whose parts are shown."""


def _most_line(most: int, config: TrainConfig) -> str:
    if most >= _MOST_TOKENS:
        return f"any batch_tokens up to {most} fits with this dataset"
    if not most:
        return f"no batch_tokens fits: not even one sample of max_length={config.max_length}"
    return f"the largest batch_tokens that fits: {most}"


def _too_large(config: TrainConfig, card: Card, training: int, evaluation: int, most: int) -> Iterator[Problem]:
    said = f"which with what must be left is more than there is: {card.name}"
    if not card.holds(training):
        less = f"set batch_tokens={most} or less" if most else f"lower ttt.chunk={config.ttt.chunk} or max_length"
        message = f"a micro-batch may take {size_text(training)}, {said}"
        yield Problem("device memory", "plan.does_not_fit", message, f"{less}, or take a card with more memory")
    if not card.holds(evaluation):
        message = f"an evaluation may take about {size_text(evaluation)}, {said}"
        fix = "lower max_length, evaluate on shorter samples (eval_dataset), or pass eval_fraction=0"
        yield Problem("device memory", "plan.does_not_fit", message, fix)

"""The config of `eagle3 serve plan`: what is known of a served drafter, from which its speed is predicted."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.schema import NonNegativeFloat, PositiveFloat, Seed

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Steps = Annotated[int, Field(gt=0, le=64, strict=True)]
Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]
MEASURED = ("tok_s", "verify_ms", "draft_ms", "cycle_ms", "acceptance_length")
"""The fields of a measured point that hold measurements."""


class MeasuredPoint(Section):
    """What a server did at one setting; give whatever was measured."""

    steps: Steps
    """Draft steps a cycle."""
    draft_tokens: PositiveInt | None = None
    """Tokens a request that the target verifies a cycle; default: steps + 1. Another number is a tree, which needs its
    `acceptance_length`."""
    batch: PositiveInt = 1
    """Requests decoded together."""
    tok_s: PositiveFloat | None = None
    """Output tokens/s of the whole batch."""
    verify_ms: PositiveFloat | None = None
    """Milliseconds of the target's verify in a cycle."""
    draft_ms: PositiveFloat | None = None
    """Milliseconds of all draft steps of a cycle together."""
    cycle_ms: PositiveFloat | None = None
    """Milliseconds from one verify to the next."""
    acceptance_length: Length | None = None
    """Tokens committed / verifies, as docs/evaluation.md counts them."""

    @property
    def tokens(self) -> int:
        """Tokens a request that are verified."""
        return self.steps + 1 if self.draft_tokens is None else self.draft_tokens

    @property
    def is_tree(self) -> bool:
        return self.tokens != self.steps + 1

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if all(getattr(self, name) is None for name in MEASURED):
            raise ValueError(f"nothing was measured at {self.steps} steps: give one of {', '.join(MEASURED)}")
        if self.tokens <= self.steps:
            raise ValueError(
                f"draft_tokens={self.tokens} is less than steps + 1 = {self.steps + 1}, a chain's own number"
            )
        if self.is_tree and self.acceptance_length is None:
            raise ValueError(
                f"draft_tokens={self.tokens} with {self.steps} steps is a tree: give its acceptance_length"
            )
        return self


class BaselinePoint(Section):
    """The same server without a drafter."""

    batch: PositiveInt = 1
    """Requests decoded together."""
    tok_s: PositiveFloat
    """Output tokens/s of the whole batch."""


class TreeSection(Section):
    """A tree of drafts to predict besides the chains."""

    steps: Steps
    """Draft steps a cycle: the tree's depth."""
    topk: Annotated[int, Field(ge=2, strict=True)]
    """Branches a step."""
    draft_tokens: Annotated[int, Field(ge=3, strict=True)]
    """Tokens a request that the target verifies a cycle, the committed one included."""
    acceptance: Annotated[list[Share], Field(min_length=1)] | None = None
    """For each depth, the share of the cycles that get there where one of the branches is accepted; default: assumed
    between a chain's and that of independent guesses."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.draft_tokens <= self.steps:
            raise ValueError(f"draft_tokens={self.draft_tokens} cannot hold a path of {self.steps} steps")
        return self


class CostSection(Section):
    """A cycle's cost where it is known; what is left out is fitted from `points`."""

    verify_fixed_ms: NonNegativeFloat | None = None
    """Milliseconds of a verify whatever it holds."""
    verify_per_token_ms: NonNegativeFloat | None = None
    """Milliseconds more for each token verified (draft tokens times batch)."""
    draft_ms_per_step: NonNegativeFloat | None = None
    """Milliseconds of a draft step."""
    overhead_ms: NonNegativeFloat | None = None
    """Milliseconds of a cycle beside verify and drafts; default: fitted where the points show it, else assumed 0."""


class ScaleSection(Section):
    """What would be if a part of the cycle took another time than it did at `points`; the baseline stays."""

    verify: PositiveFloat = 1.0
    """Factor on the time of a verify: 0.73 is 27% cheaper."""
    draft: PositiveFloat = 1.0
    """Factor on the time of a draft step."""
    overhead: PositiveFloat = 1.0
    """Factor on the overhead."""


def _shares(value: Any) -> Any:
    """One message for a number and a list alike."""
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [one for one in numbers if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one <= 1]
    if wrong or value == []:
        raise ValueError("expected a share from 0 to 1, or a list of them")
    return value


def _at_batch_1(value: Any) -> Any:
    if value is None:
        return []
    return [{"tok_s": value}] if isinstance(value, int | float) else value


class PlanConfig(Section):
    """`eagle3 serve plan`: tokens/s by draft steps, from what is known."""

    acceptance: Annotated[float | list[float] | None, BeforeValidator(_shares)] = None
    """Of the cycles that get to a depth, the share that accepts the draft there: one number for every depth, or a list
    from depth 1 on; default: fitted from `points`."""
    acceptance_file: PathText | None = None
    """What `eagle3 evaluate --json` printed, in place of `acceptance`."""
    acceptance_fall: Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.7, 1.0]
    )
    """Where one number is fitted or given for every depth: what each depth's may be of the one before, lowest and
    highest; the prediction takes 1, its interval the range. Fitted where two step counts have `acceptance_length`."""
    bench_files: list[PathText] = Field(default_factory=list)
    """What `eagle3 serve bench` or `sweep` wrote (`bench.json`, `sweep.json`): their points and baselines are added to
    those given here, and `batches` are theirs unless it is given."""
    points: list[MeasuredPoint] = Field(default_factory=list)
    """Measured points: a list of `{steps, draft_tokens, batch, tok_s, verify_ms, draft_ms, cycle_ms,
    acceptance_length}`."""
    baseline: Annotated[list[BaselinePoint], BeforeValidator(_at_batch_1)] = Field(default_factory=list)
    """Tokens/s without a drafter: a number at batch 1, or a list of `{batch, tok_s}`."""
    cost: CostSection = Field(default_factory=CostSection)
    scale: ScaleSection = Field(default_factory=ScaleSection)
    steps: Annotated[list[Steps], Field(min_length=1)] = Field(default_factory=lambda: list(range(1, 11)))
    """Draft steps to predict, as chains (topk 1)."""
    batches: Annotated[list[PositiveInt], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """Requests decoded together, to predict."""
    trees: list[TreeSection] = Field(default_factory=list)
    """Trees to predict: a list of `{steps, topk, draft_tokens, acceptance}`."""
    measurement_error: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Relative standard error of each measurement, of the baseline, and of a run at a predicted setting; taken larger
    where the points' residuals are."""
    tie: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Step counts within this share of the best are called equal to it."""
    draws: Annotated[int, Field(ge=100, le=100_000, strict=True)] = 1000
    """Draws of the measurement errors behind each interval."""
    seed: Seed = 0
    """Seed of these draws."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        wrong = []
        if self.acceptance is not None and self.acceptance_file is not None:
            wrong.append("acceptance and acceptance_file are both given: leave one out")
        low, high = self.acceptance_fall
        if not low <= 1 <= high:
            wrong.append(f"acceptance_fall is {self.acceptance_fall}, expected a range that holds 1")
        for name in ("steps", "batches"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                wrong.append(f"{name} is {values}: a number is given twice")
        batches = [point.batch for point in self.baseline]
        if len(set(batches)) < len(batches):
            wrong.append(f"baseline has a batch twice: {batches}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def baselines(self) -> dict[int, float]:
        """Tokens/s without a drafter, by batch."""
        return {point.batch: point.tok_s for point in self.baseline}

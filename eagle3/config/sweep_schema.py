"""The config of `eagle3 serve sweep`: which settings a server is started with, one after the other, and measured."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.bench_schema import LoadSection
from eagle3.config.launch_schema import LaunchConfig
from eagle3.config.plan_schema import CostSection, Steps
from eagle3.config.schema import PositiveFloat, TargetConfig


class SweepTree(Section):
    """A tree of drafts to measure besides the chains."""

    steps: Steps
    """Draft steps a cycle: the tree's depth."""
    topk: Annotated[int, Field(ge=2, strict=True)]
    """Branches a step."""
    draft_tokens: PositiveInt
    """Tokens a request that the target verifies a cycle."""


class SweepConfig(Section):
    """`eagle3 serve sweep`: a server started and measured at every step count, and the plan held against it."""

    launch: LaunchConfig
    target: TargetConfig | None = None
    """The target whose tokenizer renders the prompts; default: `launch.target`."""
    load: LoadSection
    output: PathText
    """Folder of the rows, their logs and the result; a sweep that was stopped goes on with the rows that it lacks."""
    steps: Annotated[list[Steps], Field(min_length=1)] = Field(default_factory=lambda: [1, 2, 3, 4, 5])
    """Draft steps to measure, as chains (topk 1)."""
    trees: list[SweepTree] = Field(default_factory=list)
    """Trees to measure: a list of `{steps, topk, draft_tokens}`."""
    baseline: bool = True
    """Measure the target without a drafter too, first."""
    plan_from: list[Steps] = Field(default_factory=list)
    """Step counts whose rows make a plan, at each concurrency by itself; it is held against all other rows."""
    plan_cost: CostSection = Field(default_factory=lambda: CostSection(draft_ms_per_step=0.0, overhead_ms=0.0))
    """A cycle's cost where it is known, for that plan. Without a profile a draft step cannot be told from a verified
    token, which for chains changes no prediction: by default both are taken together, as verify's."""
    acceptance_file: PathText | None = None
    """What `eagle3 evaluate --json` printed, for that plan; default: acceptance by depth of the deepest of its rows."""
    start_timeout_seconds: PositiveFloat | None = None
    """Seconds after which a server that is not ready is given up; default: as long as it takes."""
    model: str | None = None
    """Name of the target at the server, where it is not the target's own."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        wrong = []
        if len(set(self.steps)) < len(self.steps):
            wrong.append(f"steps is {self.steps}: a number is given twice")
        trees = [(tree.steps, tree.topk, tree.draft_tokens) for tree in self.trees]
        if len(set(trees)) < len(trees):
            wrong.append(f"trees has one twice: {trees}")
        missing = [steps for steps in self.plan_from if steps not in self.steps]
        if missing:
            wrong.append(f"plan_from has {missing}, which steps does not have: {self.steps}")
        if len(set(self.plan_from)) == 1 or len(set(self.plan_from)) < len(self.plan_from):
            wrong.append(f"plan_from is {self.plan_from}: give two step counts or more, each once")
        if self.launch.engine != "sglang":
            wrong.append(f"launch.engine is {self.launch.engine}: only SGLang is started and waited for here")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def rendered_for(self) -> TargetConfig:
        """The target whose tokenizer renders the prompts."""
        if self.target is not None:
            return self.target
        return TargetConfig(path=self.launch.target, trust_remote_code=self.launch.trust_remote_code)

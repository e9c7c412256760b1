"""The settings of a sweep: one server command each, all worked out before the first server is started."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.config import LaunchConfig, SweepConfig, build_config
from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.serve.launch import LaunchCommand, build_command


@dataclass(frozen=True)
class Setting:
    """One row's server.

    Attributes:
        steps: 0 is the target alone.
        folder: of the row, below the sweep's.
    """

    steps: int
    topk: int
    draft_tokens: int
    command: LaunchCommand

    @property
    def name(self) -> str:
        if not self.steps:
            return "no drafter"
        tree = "" if self.topk == 1 else f", topk {self.topk}, {self.draft_tokens} draft tokens"
        return f"{self.steps} step{'' if self.steps == 1 else 's'}{tree}"

    @property
    def folder(self) -> str:
        if not self.steps:
            return "no-drafter"
        return f"steps-{self.steps}" + ("" if self.topk == 1 else f"-topk-{self.topk}-tokens-{self.draft_tokens}")


def make_settings(cfg: SweepConfig) -> list[Setting]:
    """The baseline first, then the chains, then the trees.

    Raises:
        ProblemsError: every problem of every setting: its config, the wiring check, what would fail while loading.
    """
    shapes = [(0, 1, 1)] if cfg.baseline else []
    shapes += [(steps, 1, steps + 1) for steps in cfg.steps]
    shapes += [(tree.steps, tree.topk, tree.draft_tokens) for tree in cfg.trees]
    given = cfg.launch.model_dump()
    found: list[Setting] = []
    problems: dict[tuple[str, str, str], Problem] = {}
    for steps, topk, tokens in shapes:
        values = {**given, "steps": steps, "topk": topk, "draft_tokens": tokens if topk > 1 else None}
        try:
            launch = build_config(LaunchConfig, values, f"launch, {steps} steps, topk {topk}")
            found.append(Setting(steps, topk, tokens, build_command(launch)))
        except ProblemsError as error:  # collected: the settings mostly share theirs
            for item in error.problems:
                problems.setdefault((item.where, item.kind, item.message), item)
    raise_problems(problems.values())
    return found

"""The config of `eagle3 decode`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.regenerate_schema import TopP
from eagle3.config.schema import LayerIndex, NonNegativeFloat, Seed, TargetConfig

Steps = Annotated[int, Field(gt=0, le=64, strict=True)]
Branches = Annotated[int, Field(gt=0, le=64, strict=True)]
Temperature = Annotated[float, Field(ge=0, lt=100, allow_inf_nan=False)]


class PromptsSection(Section):
    """How the sets of prompts are read."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompts", "turns"] = "auto"
    """How their records are written, see docs/data.md; `auto` tells by their columns."""
    limit: PositiveInt | None = None
    """Ask only the first so many of each set."""
    max_length: PositiveInt = 2048
    """Longest prompt, in tokens; longer ones are left out and counted."""
    skip_bad: bool = False
    """Skip and count records that cannot be rendered, instead of stopping."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra arguments for the chat template, e.g. `{"enable_thinking": false}`."""


class DecodeConfig(Section):
    """`eagle3 decode`: answers by real speculative decoding, and what was accepted."""

    checkpoint: PathText
    """Run folder (its best checkpoint), one of its checkpoint folders, an exported folder, or another tool's."""
    target: TargetConfig
    prompts: Annotated[list[PathText], Field(min_length=1)]
    """Files of prompts or conversations, each a set of its own, e.g. `[mt_bench.jsonl,gsm8k.jsonl]`."""
    data: PromptsSection = Field(default_factory=PromptsSection)
    output: PathText | None = None
    """JSONL file to write, one answer a line with what was accepted; a run that was stopped goes on from it."""
    output_indices: list[LayerIndex] | None = None
    """Layers whose outputs the drafter was trained on; for a folder without a contract, which does not say."""
    steps: Steps = 3
    """Draft steps a round: most drafts on a path."""
    topk: Branches = 1
    """Branches a step; 1 is a chain."""
    draft_tokens: Annotated[int, Field(ge=2, le=4096, strict=True)] | None = None
    """Tokens that the target verifies a round, the last committed one included; default: steps + 1 for a chain, and for
    a tree steps * topk + 1."""
    drafts: Literal["auto", "likeliest", "drawn"] = "auto"
    """How drafts are chosen, see docs/decode.md; `auto`: drawn for a sampled chain, else the likeliest."""
    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: TopP = 1.0
    """Sample from the target's likeliest tokens that together have this probability; 1 is all of them."""
    top_k: PositiveInt | None = None
    """Sample from so many of the target's likeliest tokens; default: all of them."""
    seed: Seed = 0
    """Seed of sampling (unused at temperature 0); each prompt's own is made of it and the prompt's id."""
    verify: bool | None = None
    """Compare each answer with the target's own greedy decoding; default: yes at temperature 0 (samples cannot be)."""
    baseline: bool = False
    """Decode each prompt by the target alone too, and tell the speed-up; verifying does so anyway."""
    tolerance: NonNegativeFloat | None = None
    """Where the target's logits for its own token and for another differ by less, rounding may choose; default: by
    `target.dtype`, see docs/decode.md."""

    @property
    def verified(self) -> int:
        """Tokens that the target verifies a round."""
        return self.draft_tokens or self.steps * self.topk + 1

    @property
    def verifies(self) -> bool:
        return self.temperature == 0 if self.verify is None else self.verify

    @property
    def plain(self) -> bool:
        """Whether the target decodes alone, too."""
        return self.verifies or self.baseline

    @property
    def kind(self) -> Literal["likeliest", "drawn"]:
        if self.drafts != "auto":
            return self.drafts
        return "drawn" if self.temperature and self.topk == 1 else "likeliest"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        wrong = []
        most = self.topk + (self.steps - 1) * self.topk**2 + 1
        if self.topk == 1 and self.verified != self.steps + 1:
            wrong.append(
                f"draft_tokens={self.verified}, a chain of {self.steps} steps has {self.steps + 1}: leave it out"
            )
        elif not self.steps < self.verified <= most:
            wrong.append(
                f"draft_tokens={self.verified}, a tree of {self.steps} steps and topk {self.topk} takes "
                f"{self.steps + 1} to {most}"
            )
        if self.temperature == 0:
            given = [name for name, on in (("top_p", self.top_p < 1), ("top_k", self.top_k is not None)) if on]
            if given:
                wrong.append(f"{' and '.join(given)} at temperature 0: greedy decoding reads neither")
            if self.drafts == "drawn":
                wrong.append("drafts=drawn at temperature 0: greedy decoding draws nothing")
        elif self.verify:
            wrong.append(
                f"verify=true at temperature {self.temperature:g}: a sample is not to be compared; give baseline"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

"""The config of `eagle3 serve bench`: what is sent to which running servers, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.regenerate_schema import Count, TopP
from eagle3.config.schema import ConversationsConfig, NonNegativeFloat, PositiveFloat, Seed, TargetConfig


def _paths(value: Any) -> Any:
    """A set may be given by its path alone."""
    if not isinstance(value, dict):
        return value
    return {name: {"path": item} if isinstance(item, str) else item for name, item in value.items()}


Sets = Annotated[dict[str, ConversationsConfig], BeforeValidator(_paths), Field(min_length=1)]


class LoadSection(Section):
    """What is sent to each server; the same for `eagle3 serve bench` and `eagle3 serve sweep`."""

    sets: Sets
    """Prompts by name: `{mt_bench: questions.jsonl, mine: {path: mine.parquet, limit: 40}}`; every format of
    docs/data.md, and files of `turns` (user turns without answers, as question files are). Each user turn is asked in
    order."""
    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """Conversations in flight at a server, each number measured by itself."""
    passes: PositiveInt = 2
    """Times that every prompt is sent at each concurrency; the servers take turns, pass by pass."""
    warmup: Count | None = None
    """Requests before each pass that are not counted; default: twice the concurrency, 4 at least."""
    max_new_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: TopP = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all of them."""
    top_k: PositiveInt | None = None
    """Sample from so many of the likeliest tokens; default: all of them."""
    seed: Seed = 0
    """Seed of the order of prompts, of sampling, and of the resampling behind the intervals."""
    ignore_eos: bool = False
    """Let every answer run to `max_new_tokens`, past the end token: equal work, but text that nobody wants."""
    prefix_cache: Literal["flush", "off", "keep"] = "flush"
    """`flush` empties the server's prefix cache before each pass; `off` gives each request a cache of its own besides
    (SGLang), so that a second turn is prefilled anew; `keep` leaves it alone."""
    timeout_seconds: PositiveFloat = 600.0
    """Seconds to wait for an answer; then the request has failed."""
    reference: PathText | None = None
    """The target's own greedy answers to the same prompts (what `eagle3 regenerate` wrote): answers that differ are
    counted."""

    @model_validator(mode="after")
    def _can_be_sent(self) -> Self:
        wrong = []
        if len(set(self.concurrency)) < len(self.concurrency):
            wrong.append(f"concurrency is {self.concurrency}: a number is given twice")
        if self.reference is not None and self.temperature:
            wrong.append(f"reference holds greedy answers, but temperature is {self.temperature:g}: leave one out")
        if empty := [name for name in self.sets if not name.strip()]:
            wrong.append(f"sets has the name {empty[0]!r}: give each a name")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class BenchConfig(Section):
    """`eagle3 serve bench`: speed and acceptance of running servers, on real prompts."""

    target: TargetConfig
    urls: Annotated[list[PathText], Field(min_length=1)]
    """Addresses of the servers to measure, e.g. `["http://localhost:30000"]`; each is a row of its own."""
    baseline_url: PathText | None = None
    """Address of a server of the same target without a drafter, on the same kind of machine: measured in turns with the
    others, and what they are compared with."""
    load: LoadSection
    output: PathText
    """Folder of the result; a bench that was stopped goes on with the passes that it lacks."""
    api: Literal["auto", "sglang", "completions", "chat"] = "auto"
    """What is asked: SGLang's `/generate` with token ids, `/v1/completions` with token ids, `/v1/chat/completions`
    with messages; `auto` takes the first that the server has. Acceptance by request and depth is SGLang's only."""
    model: str | None = None
    """Name of the target at the servers; default: a server's only one, which must be called as the target is."""
    api_key_env: str = "EAGLE3_API_KEY"
    """Name of the environment variable that holds the API key, if the servers want one."""
    answers: PathText | None = None
    """JSONL file to write the answers of the first server's last pass to; default: they are not kept."""

    @property
    def all_urls(self) -> list[str]:
        """The baseline's last."""
        return [*self.urls, *([] if self.baseline_url is None else [self.baseline_url])]

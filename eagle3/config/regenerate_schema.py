"""The config of `eagle3 regenerate`, its servers' included."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.schema import ConversationsConfig, NonNegativeFloat, PositiveFloat, Seed, TargetConfig

Count = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TopP = Annotated[float, Field(gt=0, le=1)]


class PriceSection(Section):
    """What a server asks for a million tokens, in any currency."""

    input: NonNegativeFloat
    """Price of a million prompt tokens."""
    output: NonNegativeFloat
    """Price of a million answer tokens."""


class AnswerServerSection(Section):
    """Running servers of the target that give the answers, see docs/regeneration.md."""

    urls: Annotated[list[PathText], Field(min_length=1)]
    """Addresses of servers of the same target, e.g. `["http://a:30000","http://b:8000"]`; requests are balanced."""
    api: Literal["auto", "sglang", "completions", "chat"] = "auto"
    """What is asked: SGLang's `/generate` with token ids, `/v1/completions` with token ids, `/v1/chat/completions`
    with messages; `auto` takes the first that the server has."""
    model: str | None = None
    """Name of the target at the servers; default: a server's only one, which must be called as the target is."""
    api_key_env: str = "EAGLE3_API_KEY"
    """Name of the environment variable that holds the API key, if the servers want one."""
    concurrency: PositiveInt = 64
    """Requests in flight at each server."""
    timeout_seconds: PositiveFloat = 600.0
    """Seconds to wait for an answer."""
    retries: Count = 5
    """Times that a request which failed is sent again."""
    backoff_seconds: PositiveFloat = 1.0
    """Seconds before the first retry; each further one waits twice as long, 60 s at most, or as long as the server
    asks for (Retry-After)."""
    price_per_million_tokens: PriceSection | None = None
    """Prices, for the cost before and during the run."""


class RegenerateConfig(Section):
    """`eagle3 regenerate`: answers to prompts from the target itself."""

    target: TargetConfig
    data: ConversationsConfig
    output: PathText
    """JSONL file to write, one answer a line."""
    server: AnswerServerSection | None = None
    """Servers that give the answers; default: the target runs in this process."""
    turns: Literal["all", "last"] = "all"
    """Which answers of a conversation are made anew: `all` in order, each behind the new ones before it, or the `last`
    one behind the old ones."""
    cut_off: Literal["mark", "drop"] = "mark"
    """What becomes of an answer that was cut at its longest length: kept, with `finish` saying so, or left out."""
    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens."""
    batch_size: PositiveInt = 16
    """Prompts generated at a time in this process (servers: `server.concurrency`)."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: TopP = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all of them."""
    top_k: PositiveInt | None = None
    """Sample from so many of the likeliest tokens; default: all of them."""
    seed: Seed = 0
    """Seed of sampling (unused at temperature 0); each prompt's own is made of it and the prompt's id."""

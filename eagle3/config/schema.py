"""The run configs: every field typed, its docstring what `--help` prints. That of training is in `train_schema`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.cache import CacheSection

Dtype = Literal["float32", "bfloat16", "float16"]
StoreDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
LayerIndex = Annotated[int, Field(strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class TargetConfig(Section):
    """The frozen served model."""

    path: PathText
    """Folder of the target's checkpoint, or its id on the Hugging Face hub."""
    name: str | None = None
    """Name in contracts and reports; default: the last part of `path`, lower-cased."""
    revision: str | None = None
    """Hub revision (commit, tag or branch)."""
    trust_remote_code: bool = False
    """Run the checkpoint's own Python code (Kimi's tokenizer needs it)."""
    dtype: Dtype = "bfloat16"
    """Type the target computes in."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:0`, or `auto` (the first GPU, else the CPU)."""

    @property
    def contract_name(self) -> str:
        return self.name or self.path.rstrip("/").split("/")[-1].lower()


class ConversationsConfig(Section):
    """Where conversations come from and how they become token ids."""

    path: PathText
    """File of conversations or prompts (.jsonl, .json, .parquet, .csv or .txt), here or at a URL such as
    `hf://datasets/...`; with `split`, a data set's id on the Hub, or its folder."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompts", "turns"] = "auto"
    """How its records are written, see docs/data.md; `auto` tells by their columns."""
    split: str | None = None
    """Split of a data set, e.g. `train`."""
    subset: str | None = None
    """Subset (configuration) of a data set, where it has several."""
    revision: str | None = None
    """Revision of a data set on the Hub (commit, tag or branch)."""
    limit: PositiveInt | None = None
    """Use only the first so many conversations."""
    max_length: PositiveInt = 2048
    """Longest sample, in tokens; longer ones are cut at the right (regeneration leaves longer prompts out)."""
    skip_bad: bool = False
    """Skip and count conversations that cannot be rendered, instead of stopping."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra arguments for the chat template, e.g. `{"enable_thinking": false}`."""
    split_turns: Literal["auto", "always", "never"] = "auto"
    """A sample for each answer of a conversation; `auto`: where the chat template rewrites earlier turns, as thinking
    ones do, which is refused with `never`."""
    workers: PositiveInt | None = None
    """Processes that render; default: one below 20,000 conversations, else one a core, 8 at most."""
    cache: PathText | None = None
    """Folder in which to keep what was rendered, under a digest of all that it depends on; default: it is not kept."""

    @model_validator(mode="after")
    def _has_a_data_set(self) -> Self:
        given = [f"data.{key}={getattr(self, key)}" for key in ("subset", "revision") if getattr(self, key) is not None]
        if given and self.split is None:
            raise ValueError(f"{' and '.join(given)} without data.split: only a data set has these; say which split")
        return self


class StreamSection(Section):
    """The streamed engine: one decoder layer in memory at a time. What is left out is sized from the machine."""

    chunk_tokens: PositiveInt | None = None
    """Tokens that go through the target together; each chunk reads the checkpoint once."""
    micro_tokens: PositiveInt | None = None
    """Most tokens in one call of a layer; a longer sample is a call of its own."""
    device_memory_gib: PositiveFloat = 70.0
    """Most device memory to use, in GiB; less where less is free."""
    residual: Literal["auto", "device", "host", "file"] = "auto"
    """Where a chunk's residual stream lies: device memory, (pinned) host memory, or a scratch file."""
    scratch: PathText | None = None
    """Folder of the scratch file; default: the output's."""
    expert_group: PositiveInt | None = None
    """Experts unpacked at a time (for small cards); default: all of a layer if they fit."""
    read_threads: PositiveInt = 8
    """Threads that read the checkpoint."""
    tokens_per_second: PositiveFloat | None = None
    """Rate of one process that `--dry-run` reckons with; default: measured ones, see docs/benchmarks.md."""
    process_index: Annotated[int, Field(ge=0, lt=2**63, strict=True)] | None = None
    """This process's number, from 0; default: from RANK, SLURM_ARRAY_TASK_ID or SLURM_PROCID, else 0."""
    process_count: PositiveInt | None = None
    """Processes that share the work; default: from the environment, else 1."""


class ServerSection(Section):
    """The served engine: a running SGLang that returns its target's hidden states, see docs/extraction.md."""

    url: PathText = "http://localhost:30000"
    """Address of the server."""
    last_states_url: PathText | None = None
    """Address of a second server of the same target, started with `--enable-return-hidden-states` alone: asked for the
    last hidden states where the first one returns only those of the captured layers."""
    api_key_env: str = "EAGLE3_API_KEY"
    """Environment variable that holds the API key, if the server wants one."""
    concurrency: PositiveInt = 16
    """Requests in flight."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for an answer."""
    attempts: PositiveInt = 6
    """Times that a request is sent while the connection fails, with 1, 2, 4, ... seconds between."""
    check_target: bool = True
    """Compare the first states with those of the target in this process, where `target.path` fits in memory."""


class RingWriteSection(Section):
    """A ring in place of a store: extraction and training at the same time, within a bound of bytes."""

    max_bytes: PositiveInt = 64 << 30
    """Most bytes of shards in the ring; extraction waits while there is no room."""
    epochs: PositiveInt = 1
    """Passes over the samples; each one extracts them anew."""
    seed: Seed = 0
    """Seed of the order of samples, which is another one in each epoch."""
    wait_seconds: PositiveFloat = 3600.0
    """Stop when there was no room, and no trainer showed a sign of life, for so long."""


class ExtractConfig(Section):
    """`eagle3 extract`: the target's hidden states for conversations, as a store."""

    target: TargetConfig
    data: ConversationsConfig | None = None
    from_store: PathText | None = None
    """A store (folder or URL) whose own token ids and loss masks are extracted once more; `data` is not read then."""
    cache: CacheSection | None = None
    output_indices: list[LayerIndex]
    """Decoder layers whose outputs are captured, e.g. `[2,30,58]` (0-based, ascending; -1 is the embedding)."""
    output: PathText
    """Folder of the hidden-state store, or of the ring."""
    ring: RingWriteSection | None = None
    """Write a ring in place of a store, as `--stream` does."""
    engine: Literal["auto", "transformers", "streamed", "sglang"] = "auto"
    """What runs the target: the whole of it in memory (`transformers`), a layer at a time (`streamed`), a running
    server (`sglang`), or `auto`, which streams a target that does not fit."""
    stream: StreamSection = Field(default_factory=StreamSection)
    server: ServerSection = Field(default_factory=ServerSection)
    store_dtype: StoreDtype = "bfloat16"
    """Type of the stored states; `float8_e4m3fn` has a scale for each row and slot, see docs/stores.md."""
    last_hidden_rows: Literal["supervised", "all"] = "supervised"
    """Store last hidden states for the supervised tokens, which is all that training reads, or for every token."""
    last_hidden_states: Literal["post_norm", "pre_norm"] = "post_norm"
    """Store what the target's head reads after or before the final norm."""
    batch_tokens: PositiveInt = 8192
    """Tokens in a forward pass, padding included."""
    shard_max_bytes: PositiveInt = 2 << 30
    """Largest shard, in bytes."""
    shard_max_samples: PositiveInt = 1024
    """Most samples in a shard; a kill loses at most the shard in work."""
    free_disk_fraction: Fraction = 0.02
    """Share of the disk that must stay free; extraction is refused if it would not."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.data is None and self.from_store is None:
            raise ValueError("neither data nor from_store is given: nothing to extract")
        return self


class ImportConfig(Section):
    """`eagle3 data import`: another trainer's dump of hidden states, as a store; see docs/import.md."""

    source: PathText
    """Folder of the dump; files below it are found too."""
    target: TargetConfig
    """The target that made the dump: its config, tokenizer and head go into the store. `dtype`: that it computed in."""
    layers: list[LayerIndex]
    """Layers that the files hold, in the order of their slots; the files do not say. Read as `numbering` says."""
    numbering: Literal["output_index", "boundary", "sglang"]
    """What a number of `layers` means. `output_index`: the output of that layer, counted from 0; `boundary`: the index
    in Transformers' `hidden_states`, and vLLM's and speculators' numbers (0 is the embedding); `sglang`: what SGLang of
    `sglang_version` makes of it for this target."""
    last_hidden_states: Literal["post_norm", "pre_norm"]
    """Whether the files' last hidden states were taken after or before the final norm; they do not say."""
    output: PathText
    """Folder of the hidden-state store."""
    sglang_version: str | None = None
    """SGLang's version where the dump was made; required with `numbering=sglang`."""
    format: Literal["auto", "specforge", "speculators", "modelopt"] = "auto"
    """Whose files they are; `auto` tells by their names and keys."""
    loss_mask: PathText = "file"
    """Where loss masks come from: the files themselves (`file`), every token supervised (`all`), a JSONL file of `id`
    and `loss_mask`, or the folder that speculators' prepare_data.py wrote."""
    store_dtype: StoreDtype | None = None
    """Type of the stored states; default: the files' own. A narrower one rounds them, and says so."""
    last_hidden_rows: Literal["supervised", "all"] = "supervised"
    """Store last hidden states for the supervised tokens, which is all that training reads, or for every token."""
    probe: bool = True
    """Before anything is written, compute a few samples anew with the target and hold the files against them; needs all
    of its weights, which are downloaded if it is on the hub."""
    probe_samples: PositiveInt = 4
    """How many samples the probe computes, from the shortest to the longest, cut to 256 tokens."""
    skip_bad: bool = False
    """Leave out and count samples that cannot be imported, instead of stopping."""
    workers: PositiveInt | None = None
    """Files checked at a time; default: one a core, 8 at most."""
    shard_max_bytes: PositiveInt = 2 << 30
    """Largest shard, in bytes."""
    shard_max_samples: PositiveInt = 1024
    """Most samples in a shard; a kill loses at most the shard in work."""
    free_disk_fraction: Fraction = 0.02
    """Share of the disk that must stay free; the import is refused if it would not."""


class ServeConfig(Section):
    """`eagle3 export`: the checkpoint that a serving engine loads."""

    run: PathText
    """Run folder to export from."""
    output: PathText
    """Folder of the exported checkpoint."""
    checkpoint: str = "best"
    """`best`, `last`, or a checkpoint folder's name."""
    engine: Literal["sglang"] = "sglang"
    """Engine the nested layer ids are written for (vLLM's top-level key is written besides)."""
    engine_version: str | None = None
    """Its version; default: the newest known, which is printed."""
    context_length: PositiveInt | None = None
    """Longest context it will be served with, in tokens; default: the target's."""
    include_embedding: bool = False
    """Write the target's embedding too (SGLang always takes the target's own)."""
    dtype: Dtype = "bfloat16"
    """Type of the exported weights."""

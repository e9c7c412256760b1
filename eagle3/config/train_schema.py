"""The config of `eagle3 train`; see `schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from eagle3.config.base import PathText, PositiveInt, Section
from eagle3.config.cache import CacheSection
from eagle3.config.schema import Fraction, LayerIndex, NonNegativeFloat, PositiveFloat, Seed, TargetConfig

Moments = Literal["float32", "bfloat16", "float8"]
MomentKind = Literal["float32", "bfloat16", "float8", "muon"]
"""What an optimizer keeps of its parameters: AdamW's moments in one of these types, or Muon's momentum beside them."""


def _word(word: str) -> BeforeValidator:
    """YAML 1.1 reads a bare `no` or `off` as false."""
    return BeforeValidator(lambda value: word if value is False else value)


class RingReadSection(Section):
    """Training from a ring."""

    wait_seconds: PositiveFloat = 600.0
    """Stop when what is needed is not there, and the writer showed no sign of life, for so long."""
    rewind: bool = False
    """Let the ring go back to shards that were released; they are extracted once more."""


class RopeSection(Section):
    """Rotary position embedding of the drafter."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    """Scaling kind that both this drafter and the serving engines compute."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the frequencies."""
    factor: PositiveFloat | None = None
    """Scaling factor (linear, llama3)."""
    low_freq_factor: PositiveFloat | None = None
    """llama3 only."""
    high_freq_factor: PositiveFloat | None = None
    """llama3 only."""
    original_max_position_embeddings: PositiveInt | None = None
    """llama3 only, in tokens."""


class DraftSection(Section):
    """Shape of the drafter; what is left out follows the target, or with `init_from` that checkpoint."""

    num_hidden_layers: PositiveInt = 1
    """Decoder layers; only 1 is supported (more would make the TTT chains depend on each other)."""
    intermediate_size: PositiveInt | None = None
    """Width of the MLP; default: the target's."""
    num_attention_heads: PositiveInt | None = None
    """Query heads; default: the target's."""
    num_key_value_heads: PositiveInt | None = None
    """Key/value heads; default: the target's."""
    head_dim: PositiveInt | None = None
    """Width of a head; default: the target's, else hidden size / query heads."""
    draft_vocab_size: PositiveInt | None = None
    """Entries of the draft vocab; default: the target's whole vocab."""
    max_position_embeddings: PositiveInt | None = None
    """Longest context it may be served with, in tokens; default: the target's."""
    rope: RopeSection | None = None
    """Rotary embedding; default: the target's, refused if its scaling kind is not known here."""
    norm_output: bool = False
    """Hand the normed output to the next draft step (EAGLE-3.1; SGLang from 0.5.12)."""
    fc_norm: bool = False
    """Norm each captured layer on its own before `fc` (SGLang from 0.5.12)."""
    norm_before_fc: bool = False
    """Norm the captured layers, concatenated, before `fc` (SGLang from 0.5.17)."""
    init: Literal["target_head", "target_layer", "random"] = "target_head"
    """Start head and final norm from the target's; these and the decoder layer (needs `target`, with its weights, and a
    target with Llama's layers of the drafter's shape); or everything at random."""
    init_layer: Annotated[int, Field(ge=0)] | None = None
    """target_layer only: which decoder layer, by its output index; default: the last one."""
    fc_init: Literal["last_slot", "random"] = "last_slot"
    """Start `fc` by passing the deepest captured layer on (plus small noise), or at random."""

    def names(self, key: str) -> bool:
        """Whether a key was given, and not as null."""
        return key in self.model_fields_set and getattr(self, key) is not None

    @model_serializer(mode="wrap")
    def _without_options_left_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key not in _OPTIONS or key in self.model_fields_set}


class TTTSection(Section):
    """Training-time test, arXiv 2503.01840."""

    steps: PositiveInt = 7
    """Draft steps unrolled."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of step k is decay^k."""
    chain_rule: Literal["served", "shifted"] = "served"
    """`served`: exactly the chains that serving starts; `shifted`: SpecForge's rule."""
    chunk: PositiveInt | None = 2304
    """Most chains computed at once, forward and backward, which bounds memory; null: all, by autograd (slower)."""
    float8: bool = False
    """Multiply in float8 with a scale for each row: half the time for the large products, see docs/training-step.md."""
    loss: Literal["cross_entropy", "kl", "reverse_kl", "lk_alpha", "lk_lambda"] = "cross_entropy"
    """What a term costs: cross-entropy to the target's distribution, or KL, reverse KL, or the LK losses, which aim at
    the acceptance rate (arXiv 2602.23881); formulas in docs/training-step.md."""
    lk_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """lk_lambda only: greatest share of KL, the rest being total variation."""
    lk_eta: NonNegativeFloat = 3.0
    """lk_lambda only: KL's share is lk_weight * exp(-lk_eta * acceptance); 0 keeps it at lk_weight."""
    teacher_top_k: PositiveInt | None = None
    """Teach from the target's likeliest so many tokens of the draft vocab alone; null: from all of them."""
    hidden_noise: NonNegativeFloat = 0.0
    """Uniform noise on the captured layers while training: at most so much of the root mean square of a token's slot,
    up or down, e.g. 0.1 (EAGLE's idea, arXiv 2401.15077); evaluations have none."""


class OptimSection(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for all parameters, or Muon for the layer's matrices and AdamW for fc, head and norms; see
    docs/training.md."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    muon_learning_rate: PositiveFloat | None = None
    """Peak learning rate of Muon's matrices, on the same schedule; default: `learning_rate`."""
    muon_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon's step for a matrix [A, B] is its learning rate times 0.2 sqrt(max(A, B)), as large as AdamW's at the same
    rate, or times sqrt(max(1, A / B)), for rates of about 0.02."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum (Nesterov's)."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup_fraction: Fraction = 0.03
    """Share of all optimiser steps spent warming up."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step, as a share of the peak."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's betas."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only."""
    moments: Moments = "float32"
    """Type of AdamW's two moments; the narrower ones are rounded stochastically, see docs/training.md."""
    max_grad_norm: PositiveFloat = 0.5
    """Gradients are clipped to this global norm."""

    @property
    def kept(self) -> MomentKind:
        """What the optimizer keeps."""
        return "muon" if self.name == "muon" else self.moments

    @model_validator(mode="after")
    def _has_one_optimizer(self) -> Self:
        if self.name == "muon" and self.moments != "float32":
            raise ValueError(
                f"optim.moments is {self.moments} with optim.name=muon, whose momentum and moments are float32; leave "
                "out optim.moments or use optim.name=adamw"
            )
        given = [key for key in type(self).model_fields if key.startswith("muon_") and key in self.model_fields_set]
        if self.name != "muon" and (given := [key for key in given if _default(self, key) != getattr(self, key)]):
            said = " and ".join(f"optim.{key}={getattr(self, key)}" for key in given)
            raise ValueError(f"{said}: optim.name={self.name} does not read that; pass optim.name=muon too")
        return self


def _default(section: Section, key: str) -> object:
    return type(section).model_fields[key].default


class EarlyStoppingSection(Section):
    """When a run ends before its last step, by the acceptance length on held-out samples."""

    patience: PositiveInt = 3
    """Evaluations in a row without an improvement that end the run; the one before the first step does not count."""
    min_delta: NonNegativeFloat = 0.0
    """Acceptance length by which an evaluation must be above the last improvement to be one."""


class TrackingSection(Section):
    """Where metrics go; the JSONL log is always written."""

    wandb: Annotated[Literal["off", "offline", "online"], _word("off")] = "off"
    """Weights & Biases mode."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the run folder."""
    project: str = "eagle3"
    """Weights & Biases project."""
    run_name: str | None = None
    """Weights & Biases run name; default: the run folder's name."""
    log_every: PositiveInt = 10
    """Optimiser steps between log lines."""
    samples: Annotated[int, Field(ge=0, le=64)] = 4
    """Held-out samples whose drafts each evaluation shows; 0: none."""
    peak_tflops: PositiveFloat | None = None
    """A card's peak in TFLOP/s, for `mfu`; default: known for common cards, see docs/watching.md."""
    stall_seconds: PositiveFloat = 60.0
    """Say what a step waits for once it takes so many seconds, and ten times as long as usual."""


class TrainConfig(Section):
    """`eagle3 train`: fits a drafter on a hidden-state store."""

    dataset: PathText
    """Folder of the hidden-state store, or its URL (`s3://`, `gs://`, `hf://`); or folder of the ring."""
    cache: CacheSection | None = None
    ring: RingReadSection | None = None
    """Train from a ring in place of a store, as `--stream` does."""
    output: PathText
    """Run folder: config, log, checkpoints."""
    output_indices: list[LayerIndex]
    """Layers the drafter is meant for; must be what the dataset holds."""
    target: TargetConfig | None = None
    """The target to hold the dataset's contract against (config and tokenizer are compared); optional."""
    eval_dataset: PathText | None = None
    """Held-out store, folder or URL; default: `eval_fraction` of the dataset."""
    allow_incomplete: bool = False
    """Train on a store whose extraction has not ended."""
    eval_fraction: Fraction = 0.05
    """Share of the samples held out when `eval_dataset` is not given."""
    init_from: PathText | None = None
    """Start from the weights of a drafter: folder of an exported checkpoint, whoever wrote it, or of a run; see
    docs/training.md."""
    init_layers: list[LayerIndex] | None = None
    """Output indices that the drafter in `init_from` was trained on, where its config.json leaves that open."""
    rebuild_vocab: bool = False
    """Count the draft vocab anew and move the rows of its head, in place of keeping that of `init_from`."""
    vocab_file: PathText | None = None
    """Draft vocab that `eagle3 vocab make` wrote, in place of the most frequent tokens of the dataset; its length is
    `draft.draft_vocab_size`, if both are given."""
    draft: DraftSection = Field(default_factory=DraftSection)
    ttt: TTTSection = Field(default_factory=TTTSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    epochs: PositiveInt = 1
    """Passes over the training samples."""
    max_steps: PositiveInt | None = None
    """Stop after so many optimiser steps (the schedule ends there too)."""
    batch_size: PositiveInt = 1
    """Rows in a micro-batch on each process."""
    batch_tokens: PositiveInt | None = None
    """Most tokens in a micro-batch on each process: whole samples (cut to max_length) packed into one row; in place of
    batch_size and pack."""
    accumulate: PositiveInt = 1
    """Micro-batches of an optimiser step on each process."""
    pack: bool = False
    """Put several samples into one row of `max_length` tokens (they never attend to each other)."""
    max_length: PositiveInt = 2048
    """Longest sample, and without batch_tokens longest row, in tokens; longer samples are cut at the right."""
    mixed_precision: Annotated[Literal["no", "bf16"], _word("no")] = "bf16"
    """Computation type; the weights are float32 either way, the moments as `optim.moments` says."""
    seed: Seed = 0
    """Seed of initial weights, hold-out and sample order."""
    eval_every: PositiveInt | None = None
    """Optimiser steps between evaluations; default: once an epoch."""
    eval_depths: Annotated[int, Field(gt=0, le=64, strict=True)] | None = None
    """Depths by which evaluations report acceptance, that is drafts a round there; default: `ttt.steps`."""
    early_stopping: EarlyStoppingSection | None = None
    """End the run once evaluations no longer improve; default: it takes all its steps."""
    save_every: PositiveInt | None = None
    """Optimiser steps between checkpoints; default: once an epoch."""
    keep_checkpoints: PositiveInt = 3
    """Newest checkpoints kept (the best one is kept besides)."""

    @property
    def packs(self) -> bool:
        """Whether several samples share a row."""
        return self.pack or self.batch_tokens is not None

    @property
    def heldout_rows(self) -> int:
        """Rows of a forward pass of an evaluation; each holds one sample."""
        return self.batch_size if self.batch_tokens is None else self.batch_tokens // self.max_length

    @model_validator(mode="after")
    def _has_one_size_of_batches(self) -> Self:
        if self.batch_tokens is None:
            return self
        if given := [name for name in _REPLACED if name in self.model_fields_set]:
            both = " and ".join(f"{name}={getattr(self, name)}" for name in given)
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is given together with {both}: a micro-batch is one packed row of "
                f"at most batch_tokens tokens, or batch_size rows; leave out batch_tokens or {' and '.join(given)}"
            )
        if self.batch_tokens < self.max_length:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is less than max_length={self.max_length}, so a sample of that "
                "length would not fit into a micro-batch; raise batch_tokens or lower max_length"
            )
        return self

    @model_validator(mode="after")
    def _has_evaluations_to_stop_by(self) -> Self:
        if self.early_stopping is not None and self.eval_dataset is None and (not self.eval_fraction or self.ring):
            raise ValueError(
                "early_stopping goes by held-out samples, and none are held out: give eval_dataset (or, without a "
                "ring, an eval_fraction above 0), or leave out early_stopping"
            )
        return self

    @model_validator(mode="after")
    def _has_a_layer_to_start_from(self) -> Self:
        if self.draft.init == "target_layer" and self.target is None:
            raise ValueError("draft.init is target_layer without target: name the target whose layer it starts from")
        if self.draft.init != "target_layer" and self.draft.init_layer is not None:
            raise ValueError(f"draft.init_layer={self.draft.init_layer} without draft.init=target_layer; pass that too")
        return self

    @model_validator(mode="after")
    def _starts_from_something(self) -> Self:
        given = [name for name in ("init_layers", "rebuild_vocab") if getattr(self, name) not in (None, False)]
        if self.init_from is None and given:
            raise ValueError(f"{' and '.join(given)} without init_from: there is no drafter to start from")
        if self.vocab_file is not None and self.init_from is not None and not self.rebuild_vocab:
            raise ValueError("vocab_file with init_from, whose vocab is kept: pass rebuild_vocab=true too")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_replaced(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        replaced = () if self.batch_tokens is None else _REPLACED
        return {name: value for name, value in values.items() if name not in replaced}


_OPTIONS = ("norm_output", "fc_norm", "norm_before_fc")
"""Keys of `draft` that follow `init_from` unless they are given, so a stored config must not give them by itself."""
_REPLACED = ("batch_size", "pack")
"""Keys in whose place `batch_tokens` stands."""

"""Shape of the draft model, its rotary embedding, and the settings of the training-time test."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems

ChainRule = Literal["served", "shifted"]
LossKind = Literal["cross_entropy", "kl", "reverse_kl", "lk_alpha", "lk_lambda"]

_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_FIX = "set draft.rope in the training config to a kind the drafter has: " + ", ".join(_ROPE_FIELDS)
_LAYERS_FIX = (
    "use 1: with more layers a later layer's keys at step k depend on other chains, so chains could not be "
    "unrolled on their own and training would not be what serving computes"
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864), with the scaling kinds that serving engines share.

    Raises:
        ProblemsError: kinds `draft.rope.kind`, `draft.rope.missing`, `draft.rope.unused`, `draft.rope.value`.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        raise_problems(self._problems())

    def _problems(self) -> list[Problem]:
        if not isinstance(self.rope_type, str) or self.rope_type not in _ROPE_FIELDS:
            known = ", ".join(_ROPE_FIELDS)
            return [_rope_problem("kind", f"scaling kind is {self.rope_type!r}, the drafter has {known}")]
        needed = _ROPE_FIELDS[self.rope_type]
        problems = []
        for name in ("rope_theta", *_ROPE_FIELDS["llama3"]):
            value = getattr(self, name)
            wanted = name == "rope_theta" or name in needed
            if value is None:
                if wanted:
                    problems.append(_rope_problem("missing", f"kind {self.rope_type!r} needs {name}"))
            elif not wanted:
                problems.append(_rope_problem("unused", f"kind {self.rope_type!r} does not use {name} ({value!r})"))
            elif not _is_number(value) or value <= 0:
                problems.append(_rope_problem("value", f"{name} is {value!r}, expected a number above 0"))
        return problems

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Self:
        """Reads a Transformers config, in the old layout (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).

        Raises:
            ProblemsError: a kind or field that the drafter does not have, no theta, or layouts that disagree.
        """
        raise_problems(
            _rope_problem("value", f"{name} is {config[name]!r}, expected an object")
            for name in ("rope_scaling", "rope_parameters")
            if not isinstance(config.get(name) or {}, dict)
        )
        old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
        new = {"rope_theta": config.get("rope_theta"), **(config.get("rope_parameters") or {})}
        given = [layout for name, layout in (("rope_scaling", old), ("rope_parameters", new)) if config.get(name)]
        found = [_rope_values(layout) for layout in given or [old]]
        if found[0] != found[-1]:
            raise ProblemsError([_rope_problem("value", f"rope_scaling says {found[0]}, rope_parameters {found[1]}")])
        return cls(**found[0])

    def to_hf(self) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling` as serving engines read them (Transformers 5 converts this layout)."""
        scaling = {name: getattr(self, name) for name in _ROPE_FIELDS[self.rope_type]}
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": {"rope_type": self.rope_type, **scaling} if scaling else None,
        }


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the draft model.

    Attributes:
        hidden_size: width of the residual stream; must be the target's, whose embedding is used.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads.
        head_dim: width of a head; even.
        vocab_size: entries of the target's vocabulary, as in its embedding.
        draft_vocab_size: entries of the draft vocab.
        num_aux: captured target layers that `fc` reads.
        target_hidden_size: width of one captured layer.
        rms_norm_eps: epsilon of every norm.
        max_position_embeddings: longest context, in tokens.
        rope: rotary embedding.
        norm_output: hand the normed output to the next draft step (EAGLE-3.1), not the one before `norm`.
        fc_norm: norm each captured layer on its own before `fc`.
        norm_before_fc: norm the captured layers, concatenated, before `fc` (and before `fc_norm`).
        num_hidden_layers: only 1 is supported.

    Raises:
        ProblemsError: listing everything that is wrong.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    target_hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        raise_problems(self._problems())

    def _problems(self) -> list[Problem]:
        problems = [
            _problem(field.name, f"is {value!r}, expected a whole number above 0", "correct it")
            for field in dataclasses.fields(self)
            if field.type == "int" and not (type(value := getattr(self, field.name)) is int and value > 0)
        ]
        if not _is_number(self.rms_norm_eps) or self.rms_norm_eps <= 0:
            problems.append(
                _problem("rms_norm_eps", f"is {self.rms_norm_eps!r}, expected a number above 0", "correct it")
            )
        if problems:
            return problems
        if self.num_hidden_layers != 1:
            problems.append(
                _problem("num_hidden_layers", f"is {self.num_hidden_layers}, only 1 is supported", _LAYERS_FIX)
            )
        if self.num_attention_heads % self.num_key_value_heads:
            message = f"is {self.num_key_value_heads}, which does not divide {self.num_attention_heads} query heads"
            fix = "set draft.num_attention_heads and draft.num_key_value_heads together"
            problems.append(_problem("num_key_value_heads", message, fix))
        if self.hidden_size % self.num_attention_heads:
            message = f"is {self.num_attention_heads}, which does not divide hidden_size {self.hidden_size}"
            fix = "use a divisor (head_dim is free): Transformers, and so a server, refuses such a Llama config"
            problems.append(_problem("num_attention_heads", message, fix))
        if self.num_aux == 1:
            message = "is 1: SGLang applies fc only to states wider than the drafter's, so it would skip it"
            problems.append(_problem("num_aux", message, "capture two or more layers"))
        if self.head_dim % 2:
            message = f"is {self.head_dim}; rotary embedding turns pairs of channels"
            problems.append(_problem("head_dim", message, "use an even width"))
        if self.draft_vocab_size > self.vocab_size:
            message = f"is {self.draft_vocab_size}, more than the target's {self.vocab_size} tokens"
            problems.append(_problem("draft_vocab_size", message, "use at most the target's vocabulary"))
        if self.target_hidden_size != self.hidden_size:
            message = f"is {self.target_hidden_size}, the drafter's hidden_size {self.hidden_size}"
            fix = "make them equal: the drafter reads the target's embedding"
            problems.append(_problem("target_hidden_size", message, fix))
        return problems

    @classmethod
    def from_target(cls, text_config: dict[str, Any], num_aux: int = 3, **overrides: Any) -> Self:
        """The target's own shape with one decoder layer, changed by `overrides`; an override of None is left out.

        Args:
            text_config: the target's text config as a Transformers dict.
            num_aux: captured layers.
            overrides: fields of this class; `rope` as a `RopeConfig`.

        Raises:
            ProblemsError: a field that the target lacks and nobody gave, or a shape that cannot be.
        """
        values = _shape_of_target(text_config)
        values |= {"num_aux": num_aux, **{name: value for name, value in overrides.items() if value is not None}}
        if "rope" not in values:
            values["rope"] = RopeConfig.from_hf(text_config)
        if "head_dim" not in values and "hidden_size" in values and "num_attention_heads" in values:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        raise_problems(
            _problem(name, "is neither in the target's config nor given", f"set draft.{name}")
            for name in required
            if name not in values
        )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Strict reverse of `to_dict`.

        Raises:
            ProblemsError: missing or unknown fields, or anything the constructor refuses.
        """
        raise_problems(_field_problems(cls, values))
        rope = values["rope"]
        if not isinstance(rope, dict):
            raise problem_error("draft config", "draft.rope.value", f"rope is {rope!r}, expected a mapping", _ROPE_FIX)
        raise_problems(_field_problems(RopeConfig, rope))
        return cls(**{**values, "rope": RopeConfig(**rope)})

    def parameter_counts(self) -> dict[str, int]:
        """`total` with the embedding, `trainable` without it."""
        heads = 3 * self.num_attention_heads + 4 * self.num_key_value_heads  # q and o: 2 + 1, k and v: 2 + 2
        attention = self.hidden_size * self.head_dim * heads
        mlp = 3 * self.hidden_size * self.intermediate_size
        aux_width = self.num_aux * self.target_hidden_size
        fc = aux_width * self.hidden_size + aux_width * (self.fc_norm + self.norm_before_fc)
        trainable = fc + attention + mlp + 4 * self.hidden_size + self.draft_vocab_size * self.hidden_size
        return {"total": trainable + self.vocab_size * self.hidden_size, "trainable": trainable}


@dataclass(frozen=True)
class Objective:
    """What a term's loss is; `eagle3.draft.objective` has the formulas.

    Attributes:
        kind: which loss.
        weight, eta: of `lk_lambda`, whose share of KL is weight * exp(-eta * acceptance).
    """

    kind: LossKind = "cross_entropy"
    weight: float = 1.0
    eta: float = 3.0


@dataclass(frozen=True)
class TTTSettings:
    """The training-time test of arXiv 2503.01840.

    Attributes:
        steps: draft steps unrolled.
        decay: the loss of step k weighs decay^k.
        chain_rule: `served` trains exactly the chains that serving starts; `shifted` is SpecForge's rule, which
            also trains chains that start up to steps - 1 tokens before an answer.
        chunk: most chains that the fused step (`eagle3.draft.fused`) computes at once, which bounds its memory; None
            leaves the step to autograd, all chains at once.
        float8: the fused step multiplies chains' rows with the layer's and the head's matrices, and makes those
            matrices' gradients, in float8 with a scale for each row of both operands.
        loss: what a term costs, see `eagle3.draft.objective`.
        lk_weight, lk_eta: of `lk_lambda`, see `Objective`.
        teacher_top_k: the teacher is the target's distribution over so many of its likeliest tokens in the draft vocab
            (more where several are equal to the last of them); None: over all of it.
        hidden_noise: width of the noise on aux states while training, see `eagle3.draft.noise`.
    """

    steps: int = 7
    decay: float = 0.8
    chain_rule: ChainRule = "served"
    chunk: int | None = 2304
    float8: bool = False
    loss: LossKind = "cross_entropy"
    lk_weight: float = 1.0
    lk_eta: float = 3.0
    teacher_top_k: int | None = None
    hidden_noise: float = 0.0

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.lk_weight, self.lk_eta)

    def __post_init__(self) -> None:
        problems = []
        if type(self.steps) is not int or self.steps < 1:
            problems.append(_problem("ttt.steps", f"is {self.steps!r}, expected a whole number above 0", "correct it"))
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            problems.append(_problem("ttt.chunk", f"is {self.chunk!r}, expected a whole number above 0", "correct it"))
        if type(self.float8) is not bool:
            problems.append(_problem("ttt.float8", f"is {self.float8!r}, expected true or false", "correct it"))
        elif self.float8 and self.chunk is None:
            message = "is true while ttt.chunk is null: the step by autograd multiplies in its own types only"
            problems.append(_problem("ttt.float8", message, "give ttt.chunk, or leave float8 out"))
        if not _is_number(self.decay) or not 0 < self.decay <= 1:
            problems.append(_problem("ttt.decay", f"is {self.decay!r}, expected above 0 and at most 1", "correct it"))
        if self.chain_rule not in get_args(ChainRule):
            problems.append(_problem("ttt.chain_rule", f"is {self.chain_rule!r}", "use served or shifted"))
        raise_problems(problems + self._loss_problems())

    def _loss_problems(self) -> list[Problem]:
        problems = []
        if self.loss not in get_args(LossKind):
            problems.append(_problem("ttt.loss", f"is {self.loss!r}", f"use one of {', '.join(get_args(LossKind))}"))
        if not _is_number(self.lk_weight) or not 0 <= self.lk_weight <= 1:
            problems.append(_problem("ttt.lk_weight", f"is {self.lk_weight!r}, expected 0 to 1", "correct it"))
        if not _is_number(self.lk_eta) or self.lk_eta < 0:
            problems.append(_problem("ttt.lk_eta", f"is {self.lk_eta!r}, expected 0 or a number above", "correct it"))
        defaults = Objective()
        if self.loss != "lk_lambda" and (self.lk_weight, self.lk_eta) != (defaults.weight, defaults.eta):
            message = f"and ttt.lk_eta are {self.lk_weight!r} and {self.lk_eta!r}: the loss {self.loss!r} reads neither"
            problems.append(_problem("ttt.lk_weight", message, "pass ttt.loss=lk_lambda, or leave them out"))
        if not _is_number(self.hidden_noise) or self.hidden_noise < 0:
            message = f"is {self.hidden_noise!r}, expected 0 or a number above"
            problems.append(_problem("ttt.hidden_noise", message, "correct it"))
        if self.teacher_top_k is not None and (type(self.teacher_top_k) is not int or self.teacher_top_k < 1):
            message = f"is {self.teacher_top_k!r}, expected a whole number above 0, or null"
            problems.append(_problem("ttt.teacher_top_k", message, "correct it"))
        return problems


def _shape_of_target(text_config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `DraftConfig` that a Transformers config gives; multi-head latent attention has no head width."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    names += ["rms_norm_eps", "max_position_embeddings"]
    if text_config.get("kv_lora_rank") is None:
        names.append("head_dim")
    shape = {name: text_config[name] for name in names if text_config.get(name) is not None}
    if "hidden_size" in shape:
        shape["target_hidden_size"] = shape["hidden_size"]
    if "vocab_size" in shape:
        shape["draft_vocab_size"] = shape["vocab_size"]
    if "num_attention_heads" in shape:
        shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    return shape


def _rope_values(layout: dict[str, Any]) -> dict[str, Any]:
    """The `RopeConfig` fields of one layout's values."""
    values = {name: value for name, value in layout.items() if value is not None}
    kind = values.pop("type", "default")
    values.setdefault("rope_type", kind)
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    if not isinstance(values["rope_type"], str) or values["rope_type"] not in _ROPE_FIELDS:
        RopeConfig(rope_type=values["rope_type"])
    known = {field.name for field in dataclasses.fields(RopeConfig)}
    problems = [
        _rope_problem("kind", f"the config uses {name} ({value!r}), which the drafter does not have")
        for name, value in values.items()
        if name not in known
    ]
    if "rope_theta" not in values:
        problems.append(_rope_problem("missing", "the config has no rope_theta"))
    raise_problems(problems)
    return values


def _field_problems(cls: type, values: dict[str, Any]) -> list[Problem]:
    known = {field.name for field in dataclasses.fields(cls)}
    return [
        _problem(name, "is missing", "write the file again with this version") for name in sorted(known - set(values))
    ] + [
        _problem(name, f"is unknown (value {values[name]!r})", "remove it, or use the version that wrote it")
        for name in sorted(set(values) - known)
    ]


def _problem(name: str, message: str, fix: str) -> Problem:
    return Problem("draft config", f"draft.{name}", f"{name} {message}", fix)


def _rope_problem(kind: str, message: str) -> Problem:
    return Problem("draft.rope", f"draft.rope.{kind}", message, _ROPE_FIX)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

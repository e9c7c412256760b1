"""The wiring contract: what a dataset, a run or a checkpoint says was captured, from which target.

It is written beside every artifact and compared at every step that reads one. It does not prove that the tensors
are what it says; it proves that two artifacts say the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eagle3.errors import Problem, raise_problems
from eagle3.files import read_json, write_json_atomic
from eagle3.wiring.layers import (
    A_SIZE,
    LayerWiring,
    check_output_indices,
    compare_layers,
    describe_layers,
    is_int,
    is_size,
)
from eagle3.wiring.targets import config_digest as config_digest

CONTRACT_FILE = "eagle3_contract.json"
FORMAT = "eagle3-contract"
FORMAT_VERSION = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHOICES = {
    "last_hidden_states": ("post_norm", "pre_norm"),
    "dtype": ("float32", "bfloat16", "float16", "float8_e4m3fn"),
}
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
_REWRITE = "write it again with the command that made the folder"


@dataclass(frozen=True)
class WiringContract:
    """What was captured.

    Attributes:
        target_name, target_family: what the target is called, and which engine conventions it falls under.
        target_config_digest: `eagle3.wiring.targets.config_digest` of its config.json.
        num_hidden_layers, hidden_size, vocab_size: of the target.
        output_indices: captured layers in slot order, ascending; -1 is the embedding.
        last_hidden_states: whether the stored last hidden states were taken after or before the final norm.
        dtype: of the stored states.
        tokenizer_digest, chat_template_digest: of what made the token ids.
        draft_vocab_digest: `eagle3.wiring.draft_vocab.draft_vocab_digest`; None before a draft vocab is chosen.

    Raises:
        ProblemsError: every field that cannot be, kinds `contract.value` and `layers.*`.
    """

    target_name: str
    target_family: str
    target_config_digest: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    output_indices: tuple[int, ...]
    last_hidden_states: str
    dtype: str
    tokenizer_digest: str
    chat_template_digest: str
    draft_vocab_digest: str | None = None

    def __post_init__(self) -> None:
        raise_problems(_value_problems(vars(self), "contract"))
        object.__setattr__(self, "output_indices", tuple(self.output_indices))

    @property
    def wiring(self) -> LayerWiring:
        return LayerWiring(self.output_indices, self.num_hidden_layers)

    def with_draft_vocab(self, digest: str) -> Self:
        """The same contract for a drafter with this draft vocab."""
        return dataclasses.replace(self, draft_vocab_digest=digest)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        values = dataclasses.asdict(self) | {"output_indices": list(self.output_indices)}
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **values}

    @classmethod
    def from_dict(cls, values: object, where: str = "contract") -> Self:
        """Strict reverse of `to_dict`.

        Raises:
            ProblemsError: every missing, unknown or wrong field; kinds `contract.*`, `layers.*`.
        """
        raise_problems(_form_problems(values, where))
        assert isinstance(values, Mapping)
        fields = {key: value for key, value in values.items() if key not in ("format", "format_version")}
        raise_problems(_value_problems(fields, where))
        return cls(**fields)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a contract file, or the one in a folder.

        Raises:
            ProblemsError: kinds `file.missing`, `file.not_json`, and those of `from_dict`.
        """
        file = path / CONTRACT_FILE if path.is_dir() else path
        return cls.from_dict(read_json(file, "a wiring contract"), str(file))

    def save(self, path: Path) -> None:
        """Writes the contract to a file, or into a folder under its usual name."""
        write_json_atomic(path / CONTRACT_FILE if path.is_dir() else path, self.to_dict())

    def compare(self, other: WiringContract, mine: str, theirs: str, any_dtype: bool = False) -> list[Problem]:
        """Every difference between two contracts, kinds `contract.<field>`.

        A draft-vocab digest that one side does not have yet is no difference.

        Args:
            mine: what this contract belongs to, in words; differing layers are described as its fault.
            theirs: what the other belongs to.
            any_dtype: the states may be stored in different types, where they are of two stores.
        """
        problems = []
        for field in dataclasses.fields(self):
            ours, others = getattr(self, field.name), getattr(other, field.name)
            undecided = field.name == "draft_vocab_digest" and None in (ours, others)
            if ours == others or undecided or (any_dtype and field.name == "dtype"):
                continue
            message = f"{field.name} is {ours!r} in {mine}, {others!r} in {theirs}"
            if field.name == "output_indices":
                message = _layers_message(ours, others, mine, theirs)
            fix = f"{mine} and {theirs} must belong together: replace one of them, or make it again"
            problems.append(Problem(mine, f"contract.{field.name}", message, fix))
        return problems


def _layers_message(ours: tuple[int, ...], others: tuple[int, ...], mine: str, theirs: str) -> str:
    difference = compare_layers(others, ours)
    assert difference is not None
    return (
        f"output_indices: {mine} has {describe_layers(ours)} {list(ours)}, {theirs} has {describe_layers(others)} "
        f"{list(others)}; in {mine}, {difference[1]}"
    )


def _form_problems(values: object, where: str) -> list[Problem]:
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, Mapping) else type(values).__name__
        message = f"is not a wiring contract: format is {found!r}, expected {FORMAT!r}"
        return [Problem(where, "contract.format", message, _REWRITE)]
    if not is_int(values.get("format_version")) or values["format_version"] != FORMAT_VERSION:
        message = f"format_version is {values.get('format_version')!r}, this version reads {FORMAT_VERSION}"
        return [Problem(where, "contract.format_version", message, "use the eagle3 that wrote it")]
    known = {field.name for field in dataclasses.fields(WiringContract)} | {"format", "format_version"}
    problems = [
        Problem(where, "contract.missing", f"{name} is missing", _REWRITE) for name in sorted(known - set(values))
    ]
    for name in sorted(set(values) - known):
        problems.append(Problem(where, "contract.unknown", f"{name!r} is not part of a contract", _REWRITE))
    return problems


def _value_problems(values: Mapping[str, Any], where: str) -> list[Problem]:
    def problem(name: str, expected: str) -> Problem:
        return Problem(where, "contract.value", f"{name} is {values[name]!r}, expected {expected}", _REWRITE)

    problems = [
        problem(name, "a non-empty text")
        for name in ("target_name", "target_family")
        if not isinstance(values[name], str) or not values[name]
    ]
    for name in ("target_config_digest", "tokenizer_digest", "chat_template_digest", "draft_vocab_digest"):
        absent = name == "draft_vocab_digest" and values[name] is None
        if not absent and not (isinstance(values[name], str) and _DIGEST.fullmatch(values[name])):
            problems.append(problem(name, "sha256:<64 hexadecimal digits>"))
    sizes_ok = True
    for name in _SIZES:
        if not is_size(values[name]):
            problems.append(problem(name, A_SIZE))
            sizes_ok &= name != "num_hidden_layers"
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            problems.append(problem(name, f"one of {', '.join(choices)}"))
    if sizes_ok:
        problems += check_output_indices(
            values["output_indices"], values["num_hidden_layers"], f"{where}: output_indices"
        )
    return problems

"""The one owner of layer numbering.

A decoder stack of N layers has N + 1 boundaries: boundary 0 is the embedding output, boundary i + 1 the output of
layer i, boundary N the output of the last layer *before* the final norm. An output index (what is stored everywhere)
names decoder layer i by its output; -1 is the embedding. So boundary = output index + 1.

Legend: N decoder layers of the target model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.errors import Problem, problem_error, raise_problems

if TYPE_CHECKING:
    from eagle3.wiring.engines import EngineIds

EMBEDDING = -1
LARGEST_SIZE = 2**31 - 1
A_SIZE = f"a whole number from 1 to {LARGEST_SIZE}"


def is_int(value: object) -> bool:
    """True for whole numbers that are not bools."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: object, largest: int = LARGEST_SIZE) -> bool:
    """True for whole numbers that a width or a count can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest


def to_boundary(output_index: int) -> int:
    """Where the output of a layer is in the stack: 0 is the embedding's, N that of the last layer before the norm."""
    return output_index + 1


def to_output_index(boundary: int) -> int:
    """The layer whose output a boundary is; -1 is the embedding."""
    return boundary - 1


def check_output_indices(
    values: object, num_hidden_layers: int, where: str = "output_indices", expected_count: int | None = None
) -> list[Problem]:
    """Everything that is wrong with a list of output indices for a target of `num_hidden_layers` layers.

    Kinds: `layers.type`, `layers.negative` (other than an explicit -1), `layers.out_of_range`, `layers.duplicate`,
    `layers.unsorted`, `layers.count`. It does not prove that the drafter was trained on these layers.
    """
    if not is_size(num_hidden_layers):
        message = f"num_hidden_layers is {num_hidden_layers!r}, expected {A_SIZE}"
        return [Problem(where, "layers.type", message, "read it from the target's config.json")]
    if not isinstance(values, list | tuple) or not all(is_int(value) for value in values):
        message = f"is {values!r}, expected a list of whole numbers"
        return [Problem(where, "layers.type", message, "write e.g. [2, 30, 58]")]
    problems = []
    last = num_hidden_layers - 1
    if negative := [value for value in values if value < EMBEDDING]:
        message = f"{negative} is negative, expected -1 (the embedding) or a layer from 0 to {last}"
        problems.append(Problem(where, "layers.negative", message, "count layers from 0 at the embedding's side"))
    if beyond := [value for value in values if value > last]:
        message = f"{beyond} is out of range, the target's layers are 0 to {last}"
        problems.append(
            Problem(where, "layers.out_of_range", message, "check the target, and output index or boundary")
        )
    if repeated := [value for value, count in Counter(values).items() if count > 1]:
        problems.append(Problem(where, "layers.duplicate", f"{repeated} is listed more than once", "list it once"))
    if list(values) != sorted(values):
        fix = f"write {sorted(set(values))}: engines capture in ascending order whatever the list says"
        problems.append(Problem(where, "layers.unsorted", f"{list(values)} is not ascending", fix))
    if not values or (expected_count is not None and len(values) != expected_count):
        expected = "at least 1" if expected_count is None else str(expected_count)
        message = f"has {len(values)} layers, expected {expected}"
        problems.append(Problem(where, "layers.count", message, "list one layer for each aux slot of the drafter"))
    return problems


@dataclass(frozen=True)
class LayerWiring:
    """Which of a target's layers feed the drafter's aux slots, in slot order.

    Attributes:
        output_indices: ascending output indices, one for each aux slot; lists are accepted.
        num_hidden_layers: N, decoder layers of the target.

    Raises:
        ProblemsError: see `check_output_indices`.
    """

    output_indices: tuple[int, ...]
    num_hidden_layers: int

    def __post_init__(self) -> None:
        raise_problems(check_output_indices(self.output_indices, self.num_hidden_layers))
        object.__setattr__(self, "output_indices", tuple(self.output_indices))

    @classmethod
    def from_boundaries(cls, boundaries: Iterable[int], num_hidden_layers: int) -> LayerWiring:
        """The wiring that captures these boundaries (0 = embedding)."""
        return cls(tuple(map(to_output_index, boundaries)), num_hidden_layers)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries in slot order: output index + 1."""
        return tuple(map(to_boundary, self.output_indices))

    @property
    def num_aux(self) -> int:
        return len(self.output_indices)

    @property
    def transformers_indices(self) -> tuple[int, ...]:
        """Indices into Transformers' `hidden_states` tuple (0 = embedding).

        Raises:
            ProblemsError: kind `layers.post_norm`; Transformers' last entry is taken after the final norm, so the
                raw output of the last layer has no index there.
        """
        if self.output_indices[-1] == self.num_hidden_layers - 1:
            message = (
                f"layer {self.num_hidden_layers - 1} is the last; `hidden_states[-1]` is its output after the norm"
            )
            raise problem_error("output_indices", "layers.post_norm", message, "capture it with a hook on the layer")
        return self.boundaries

    def numbers_for(self, engine: str, version: str | None = None, *, family: str) -> EngineIds:
        """What to write for a serving engine; see `eagle3.wiring.engines.ids_to_write`."""
        from eagle3.wiring.engines import ids_to_write

        return ids_to_write(self, engine, version, family)


def default_boundaries(num_hidden_layers: int) -> tuple[int, int, int]:
    """What SGLang, vLLM and SpecForge fall back to; not in order for shallow targets."""
    return (2, num_hidden_layers // 2, num_hidden_layers - 3)


def default_output_indices(num_hidden_layers: int) -> tuple[int, ...]:
    """The layers that SGLang, vLLM and SpecForge agree on: boundaries 2, N // 2, N - 3.

    Raises:
        ProblemsError: kind `layers.shallow`; with fewer than 7 layers they would repeat or be out of order.
    """
    boundaries = default_boundaries(num_hidden_layers)
    if not 2 < boundaries[1] < boundaries[2]:
        message = f"a target of {num_hidden_layers} layers is too shallow for the default boundaries {boundaries}"
        raise problem_error("output_indices", "layers.shallow", message, "name the layers yourself")
    return LayerWiring.from_boundaries(boundaries, num_hidden_layers).output_indices


def parse_layers(text: str) -> tuple[int, ...]:
    """Output indices written as `2,30,58`.

    Raises:
        ProblemsError: kind `layers.type`.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is not a list of whole numbers"
        raise problem_error("layers", "layers.type", message, "write e.g. 2,30,58") from None


def describe_layers(output_indices: Sequence[int]) -> str:
    """In words, e.g. `the embedding and the outputs of layers 2, 30, 58`."""
    layers = [index for index in output_indices if index != EMBEDDING]
    outputs = f"the output{'s' * (len(layers) > 1)} of layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    if not layers:
        return "the embedding" if output_indices else "no layer"
    return f"the embedding and {outputs}" if EMBEDDING in output_indices else outputs


def compare_layers(expected: Sequence[int], found: Sequence[int]) -> tuple[str, str] | None:
    """How the layers `found` differ from those `expected` (output indices in slot order), or None.

    Returns:
        A name (`permuted`, `one_early`, `one_late`, `embedding_added`, `embedding_dropped`, `other_layers`) and the
        same in words.
    """
    if tuple(expected) == tuple(found):
        return None
    shifts = {got - want for got, want in zip(found, expected, strict=False)} if len(found) == len(expected) else set()
    if sorted(expected) == sorted(found):
        return "permuted", "the same layers in other slots"
    if shifts == {-1}:
        return "one_early", "every layer is one too early"
    if shifts == {1}:
        return "one_late", "every layer is one too late"
    without = [index for index in found if index != EMBEDDING]
    if EMBEDDING not in expected and without == list(expected):
        return "embedding_added", "the embedding was added"
    if EMBEDDING not in found and list(found) == [index for index in expected if index != EMBEDDING]:
        return "embedding_dropped", "the embedding is missing"
    return "other_layers", "these are other layers"

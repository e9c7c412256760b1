"""What `eagle3.wiring` says an SGLang version captures is what that version's own code sets up."""

from __future__ import annotations

import ast
import itertools
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from eagle3.errors import ProblemsError
from eagle3.wiring import LayerWiring, ids_to_write
from eagle3.wiring.engines import find_convention, requested_boundaries
from tests.serving.conftest import EngineScript
from tests.serving.sglang_venv import SERVED_VERSION, VENV

Question = tuple[str, int, tuple[int, ...]]  # family, number of layers, ids
FAMILIES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "deepseek", "kimi_k25")
DEPTHS = (8, 12, 61)
# The two sides of sglang PR 25454; the classes whose setter is taken out of those wheels.
BEFORE, AFTER = "0.5.12.post1", "0.5.13"
OLD_SETTERS = {"deepseek": ("deepseek_v2.py", "DeepseekV2ForCausalLM"), "llama": ("llama.py", "LlamaForCausalLM")}


def questions(version: str, families: Sequence[str]) -> list[Question]:
    """A grid of id lists, and for each that is one of output indices also what an export would write."""
    asked = [(family, depth, ids) for family in families for depth in DEPTHS for ids in id_lists(depth)]
    return asked + [
        (family, depth, written) for family, depth, ids in asked if (written := exported(version, family, depth, ids))
    ]


def id_lists(num_hidden_layers: int) -> Iterator[tuple[int, ...]]:
    """One to four ids from both ends and the middle of the stack, ascending or not."""
    middle, last = num_hidden_layers // 2, num_hidden_layers - 2
    pool = sorted({-1, 0, 1, 2, 3, middle, middle + 1, last - 1, last})
    yield from ((value,) for value in pool)
    yield from itertools.permutations(pool, 2)
    yield from itertools.combinations(pool, 3)
    yield from ((0, 1, 2, 3), (1, 2, 3, 4), (2, 0, 1), (last, 1, 2), (1, last, middle))
    yield from ((2, last + 1), (1, last + 1), (2, last + 2), (1, 3, last + 2))  # the last layer, by either number


def exported(version: str, family: str, num_hidden_layers: int, ids: Sequence[int]) -> tuple[int, ...] | None:
    """What is written for these output indices; None if they are none, or cannot be captured."""
    try:
        return ids_to_write(LayerWiring(tuple(ids), num_hidden_layers), "sglang", version, family).ids
    except ProblemsError:
        return None


def count_agreements(version: str, asked: Sequence[Question], captured: Sequence[Sequence[int]]) -> int:
    """Fails where wiring and the real code differ; counts the lists whose export captures exactly its layers."""
    found = dict(zip(asked, map(tuple, captured), strict=True))
    for (family, depth, ids), real in found.items():
        rule = find_convention("sglang", version, family)
        assert requested_boundaries(ids, rule, depth) == real, (version, family, depth, ids)
    writable = 0
    for family, depth, ids in found:
        written = exported(version, family, depth, ids)
        if written is not None and (family, depth, written) in found:
            writable += 1
            assert found[family, depth, written] == LayerWiring(ids, depth).boundaries, (version, family, depth, ids)
    return writable


def test_the_installed_version_sets_up_what_wiring_says(engine: EngineScript) -> None:
    asked = questions(SERVED_VERSION, FAMILIES)

    assert count_agreements(SERVED_VERSION, asked, engine("capture_setters", asked)) > 2000


@pytest.mark.parametrize("version", [BEFORE, AFTER])
def test_both_sides_of_the_change_set_up_what_wiring_says(version: str) -> None:
    setters = {family: compiled_setter(version, *place) for family, place in OLD_SETTERS.items()}
    asked = questions(version, list(OLD_SETTERS))

    assert count_agreements(version, asked, [captured(setters[family], *rest) for family, *rest in asked]) > 400


def test_the_change_is_where_wiring_says() -> None:
    before, after = (compiled_setter(version, *OLD_SETTERS["deepseek"]) for version in (BEFORE, AFTER))

    assert captured(before, 61, (2, 30, 58)) == captured(after, 61, (3, 31, 59)) == [3, 31, 59]
    assert captured(after, 61, (2, 30, 58)) == [2, 30, 58]
    assert captured(before, 61, (1, 29, 57)) == captured(after, 61, (1, 29, 57)) == [2, 30, 58]


def captured(setter: Any, num_hidden_layers: int, ids: Sequence[int]) -> list[int]:
    """`layers_to_capture` after a setter ran on a stand-in for its model."""
    model = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=num_hidden_layers),
        pp_group=SimpleNamespace(is_last_rank=True),
        model=SimpleNamespace(layers_to_capture=[]),
    )
    setter(model, list(ids))
    layers: list[int] = model.model.layers_to_capture
    return layers


def compiled_setter(version: str, file: str, class_name: str) -> Any:
    """The setter of one released version, out of its wheel: that one function is compiled, nothing is installed."""
    with zipfile.ZipFile(wheel(version)) as archive:
        source = archive.read(f"sglang/srt/models/{file}")
    owner = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    names = [node for node in owner.body if isinstance(node, ast.FunctionDef) and "set_eagle3_layers" in node.name]
    assert len(names) == 1
    space: dict[str, Any] = {"Optional": Optional, "List": list}
    exec(compile(ast.Module(list(names), type_ignores=[]), file, "exec"), space)
    return space[names[0].name]


def wheel(version: str) -> str:
    """A released wheel, downloaded once into the venv."""
    folder = VENV / "wheels" / version
    if not list(folder.glob("*.whl")):
        command = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        subprocess.run([str(VENV / "bin" / "python"), *command, f"sglang=={version}"], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return str(path)

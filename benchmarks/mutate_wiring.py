"""How many deliberate faults in `eagle3/wiring` do its tests notice?

Each mutant is one change in one place: a comparison turned round, a whole number one higher or lower, `and` for `or`,
a `not` or an `if` condition dropped, a rule of the tables swapped, a table's item deleted, a text returned empty. The
tests of `tests/unit/wiring` run on a copy; a mutant survives if they still pass. Results are appended to a JSON-lines
file, and mutants that are in it already are skipped, so that a run can be stopped and continued.

    python benchmarks/mutate_wiring.py --results /tmp/mutants.jsonl --sample 200
    python benchmarks/mutate_wiring.py --results /tmp/mutants.jsonl --files diagnosis.py fingerprint.py
    python benchmarks/mutate_wiring.py --results /tmp/mutants.jsonl --report
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import datasets  # noqa: F401  (loaded once, before the forks)
import hypothesis  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import transformers

for architecture in ("Kimi_K25ForConditionalGeneration", "LlamaForCausalLM", "Qwen3ForCausalLM"):
    getattr(transformers, architecture)  # it is imported on first use

ROOT = Path(__file__).parents[1]
ROOM = Path("eagle3/wiring")
TESTS = "tests/unit/wiring"
SLOWEST = ("test_checks.py", "test_fingerprint.py")
# Modules that no other test file of the room reaches; of the slow one, what is quick comes first.
FINGERPRINT = (("test_fingerprint.py", "-k", "not kimi and not qwen3 and not smollm2"), ("test_fingerprint.py",))
FROZEN = ("test_public_api.py", "-k", "frozen")
ONLY_TESTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "diagnosis.py": (("test_diagnosis.py",), ("test_probe_report.py",), FROZEN, *FINGERPRINT),
    "probe_report.py": (("test_probe_report.py",), FROZEN),
    "fingerprint.py": (("test_measure.py",), *FINGERPRINT),
    "fingerprint_check.py": (("../data/test_store_fingerprint.py",), ("test_dataset.py", "test_hostile_input.py")),
}
SECONDS = 240
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
RULES = ("OUTPUT_INDEX", "BOUNDARY", "OUTPUT_INDEX_IF_FIRST_IS_1", "BOUNDARY_IF_LAST_IS_N", "DEFAULTS")


@dataclass(frozen=True)
class Mutant:
    """One change: its file, the node (counted as `ast.walk` does) and which of the node's changes, in words."""

    file: str
    node: int
    place: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.change}"

    def source(self, original: str) -> str:
        tree = ast.parse(original)
        node = next(other for index, other in enumerate(ast.walk(tree)) if index == self.node)
        apply(node, self.place)
        return ast.unparse(tree)


def mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of one file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unused = {id(part) for node in ast.walk(tree) for part in annotations(node)}
    for number, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        for place, what in enumerate([] if id(node) in unused else changes(node)):
            yield Mutant(file.name, number, place, f"line {line}, {number}.{place}: {what}")


def annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Every part of this node's own type annotations, which do nothing when the code runs."""
    for expression in (getattr(node, "annotation", None), getattr(node, "returns", None)):
        yield from ast.walk(expression) if expression is not None else ()


def changes(node: ast.AST) -> list[str]:
    """What can be changed in this node, in words; `apply` makes the change of the same index."""
    match node:
        case ast.Compare():
            return [f"{type(op).__name__} turned round" for op in node.ops]
        case ast.BoolOp():
            return ["and for or, or for and", *(f"operand {i} dropped" for i in range(len(node.values)))]
        case ast.UnaryOp(op=ast.Not()):
            return ["not dropped"]
        case ast.If() | ast.IfExp():
            return ["condition always true", "condition always false"]
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
            return ["another operator"]
        case ast.Constant(value=bool()):
            return ["the other truth value"]
        case ast.Constant(value=int()):
            return ["one more", "one less"]
        case ast.Attribute(attr=attr) if attr in RULES:
            return [f"another rule than {attr}"]
        case ast.Dict() if len(node.keys) > 1:
            return [f"item {i} deleted" for i in range(len(node.keys))]
        case ast.Set() | ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) if len(node.elts) > 1:
            return [f"element {i} deleted" for i in range(len(node.elts))]
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return ["nothing returned"]
        case ast.Expr(value=ast.Call()):
            return ["call dropped"]
    return []


def apply(node: ast.AST, place: int) -> None:
    match node:
        case ast.Compare():
            node.ops[place] = COMPARISONS[type(node.ops[place])]()
        case ast.BoolOp() if place == 0:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.BoolOp():
            del node.values[place - 1]
            if len(node.values) == 1:
                node.values.append(node.values[0])
        case ast.UnaryOp():
            node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
        case ast.If() | ast.IfExp():
            node.test = ast.BoolOp(ast.Or() if place == 0 else ast.And(), [node.test, ast.Constant(place == 0)])
        case ast.BinOp():
            node.op = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}[type(node.op)]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            assert isinstance(node.value, int)
            node.value += 1 if place == 0 else -1
        case ast.Attribute():
            node.attr = RULES[(RULES.index(node.attr) + 1) % 2] if node.attr in RULES[:2] else RULES[0]
        case ast.Dict():
            del node.keys[place], node.values[place]
        case ast.Set() | ast.Tuple() | ast.List():
            del node.elts[place]
        case ast.Return():
            node.value = None
        case ast.Expr():
            node.value = ast.Constant(None)


def survives(mutant: Mutant, copy_root: Path) -> bool:
    """Whether the tests pass with this mutant in place."""
    path = copy_root / ROOM / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source(original), encoding="utf-8")
    alive = passes(mutant.file, copy_root)
    path.write_text(original, encoding="utf-8")
    return alive


def passes(file: str, copy_root: Path) -> bool:
    """Whether the tests of a file pass; they run in a fork, which has torch and pytest loaded."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os._exit(run_tests(staged_tests(file, copy_root), copy_root))
    _, status = os.waitpid(child, 0)
    return status == 0


def run_tests(stages: list[list[str]], copy_root: Path) -> int:
    os.chdir(copy_root)
    sys.path.insert(0, str(copy_root))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for tests in stages:  # most mutants are noticed before the later ones are even collected
        if code := pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]):
            return int(code)
    return 0


def staged_tests(file: str, copy_root: Path) -> list[list[str]]:
    """All test files that can notice a mutant of a file, with options: its own first and the slowest last."""
    own = f"test_{file}"
    files = sorted(path.name for path in (copy_root / TESTS).glob("test_*.py"))
    others = sorted((name for name in files if name != own), key=SLOWEST.__contains__)
    stages = ONLY_TESTS.get(file, [[own], others] if own in files else [others])
    return [[f"{TESTS}/{part}" if part.endswith(".py") else part for part in stage] for stage in stages]


def copied(folder: Path) -> Path:
    for part in ("eagle3", "tests", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--sample", type=int, help="that many mutants, drawn at random; default all")
    parser.add_argument("--files", nargs="+", default=["*.py"], help="of eagle3/wiring; default all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--report", action="store_true", help="only print the score of what ran so far")
    args = parser.parse_args()
    known = {}
    if args.results.exists():
        known = {row["name"]: row["survives"] for row in map(json.loads, args.results.read_text().splitlines())}
    if not args.report:
        files = sorted(path for name in args.files for path in (ROOT / ROOM).glob(name))
        todo = [mutant for file in files for mutant in mutants(file)]
        print(f"{len(todo)} mutants")
        random.Random(args.seed).shuffle(todo)
        with tempfile.TemporaryDirectory() as folder:
            root = copied(Path(folder))
            sys.dont_write_bytecode = True
            tested = {mutant.file: staged_tests(mutant.file, root) for mutant in todo[: args.sample]}
            for file in {frozenset(chain(*stages)): file for file, stages in tested.items()}.values():
                assert passes(file, root), f"the tests of {file} do not pass as it is"
            for mutant in todo[: args.sample]:
                if mutant.name not in known:
                    known[mutant.name] = survives(mutant, root)
                    with open(args.results, "a", encoding="utf-8") as handle:
                        handle.write(json.dumps({"name": mutant.name, "survives": known[mutant.name]}) + "\n")
    survivors = sorted(name for name, lives in known.items() if lives)
    print(*survivors, f"{len(known) - len(survivors)} of {len(known)} mutants noticed", sep="\n")


if __name__ == "__main__":
    main()

"""What importers rely on: names, no output, the JSON's schema, and a table of kinds that is never stale."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

import eagle3.wiring
from eagle3.errors import Problem, ProblemsError
from eagle3.wiring import layers
from tests.unit.wiring.cases import change_ids, make_contract, write_checkpoint, write_store
from tests.unit.wiring.foreign import SPECFORGE, llama_tensors, write_foreign, write_target

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
ROOMS = (
    "checkpoint config context contract dataset draft_vocab engine file fingerprint layer_ids layers safetensors target"
)
PREFIXES = "|".join([*ROOMS.split(), "tensor", "wiring"])
KIND = re.compile(rf"({PREFIXES})\.[a-z0-9_]+")
FILE_NAMES = {"config.json", "contract.json"}


def kinds_in_code() -> set[str]:
    """Every literal that is a kind; `<field>` where the code puts a field's name."""
    found: set[str] = set()
    for path in [*(ROOT / "eagle3/wiring").glob("*.py"), ROOT / "eagle3/files.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant) and len(node.values) == 2:
                prefix = str(node.values[0].value)
                if re.fullmatch(rf"({PREFIXES})\.", prefix) and prefix != "wiring.":
                    found.add(f"{prefix}<field>")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and KIND.fullmatch(node.value):
                found.add(node.value)
    differences = ast.walk(ast.parse(inspect.getsource(layers.compare_layers)))
    names = {node.value.elts[0].value for node in differences  # type: ignore[attr-defined]
             if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)}  # fmt: skip
    return (found | {f"wiring.{name}" for name in names}) - FILE_NAMES


def test_every_problem_kind_is_in_the_documented_table_and_no_other() -> None:
    rows = [line for line in (DOCS / "problem-kinds.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    documented = [kind for row in rows for kind in re.findall(r"`([a-z_]+\.[a-z0-9_<>]+)`", row.split(" | ")[0])]

    assert len(documented) == len(set(documented))
    assert set(documented) == kinds_in_code()


def test_what_can_be_imported_is_what_is_public() -> None:
    names = {name for name, value in vars(eagle3.wiring).items() if name[0] != "_" and not inspect.ismodule(value)}

    assert names == set(eagle3.wiring.__all__)


def test_every_record_is_frozen() -> None:
    for module in pkgutil.iter_modules(eagle3.wiring.__path__):
        if module.name != "fingerprint":
            members = vars(importlib.import_module(f"eagle3.wiring.{module.name}")).values()
            records = [value for value in members if isinstance(value, type) and dataclasses.is_dataclass(value)]
            assert all(record.__dataclass_params__.frozen for record in records), module.name  # type: ignore[attr-defined]


def test_the_public_names_exist_are_documented_and_have_types_and_a_docstring() -> None:
    page = (DOCS / "wiring.md").read_text(encoding="utf-8")
    section = page.split("## Public API")[1].split("\n## ")[0]

    for name in eagle3.wiring.__all__:
        assert f"`{name}" in section, name
        value = getattr(eagle3.wiring, name)
        if callable(value):
            assert value.__doc__, name
            assert all(parameter.annotation != inspect.Parameter.empty or parameter.name == "args"
                       for parameter in inspect.signature(value).parameters.values()), name  # fmt: skip


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    """A call of every public function, most with something wrong."""
    contract = make_contract()
    good = write_checkpoint(folder / "good")
    bad = write_checkpoint(folder / "bad", config=change_ids([-1, 2, 30, 58]))
    foreign = write_foreign(folder / "foreign", SPECFORGE, llama_tensors())
    target = write_target(folder / "target")
    store = write_store(folder / "store", contract)
    api = eagle3.wiring
    problems = [Problem("a", "b.c", "d", "e")]
    return {
        "assert_wiring": lambda: api.assert_wiring(bad),
        "boundaries_read": lambda: api.boundaries_read([2], "sglang", None, "llama", 8),
        "check_checkpoint": lambda: api.check_checkpoint(foreign, dataset=store, target=target),
        "check_dataset": lambda: api.check_dataset(store, make_contract(output_indices=(1, 2, 3))),
        "check_draft_vocab": lambda: api.check_draft_vocab([9], [1], 4, "x"),
        "check_output_indices": lambda: api.check_output_indices("x", 4),
        "config_digest": lambda: api.config_digest({"a": 1}),
        "default_output_indices": lambda: api.default_output_indices(61),
        "describe_checkpoint": lambda: api.describe_checkpoint(good),
        "draft_vocab_digest": lambda: api.draft_vocab_digest([1], 4),
        "exit_code": lambda: api.exit_code(problems),
        "explain": lambda: api.explain("kimi-k2.5", "2,30,58"),
        "family_of_model_type": lambda: api.family_of_model_type("mamba"),
        "find_convention": lambda: api.find_convention("sglang", "9", "llama"),
        "ids_to_write": lambda: api.ids_to_write(contract.wiring, "sglang", None, "kimi_k25"),
        "newest_known": lambda: api.newest_known("tensorrt_llm"),
        "render_explain": lambda: api.render_explain(api.explain("kimi-k2.5", "2")),
        "render_json": lambda: api.render_json(problems),
        "render_text": lambda: api.render_text(problems),
        "target_facts": lambda: api.target_facts(target),
    }


def test_no_public_function_writes_to_stdout_or_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    called = calls(tmp_path)
    functions = {name for name in eagle3.wiring.__all__ if inspect.isfunction(getattr(eagle3.wiring, name))}

    assert called.keys() >= functions
    for call in called.values():
        try:
            call()
        except ProblemsError as error:
            assert error.problems
    assert capfd.readouterr() == ("", "")


def schema(name: str) -> dict[str, object]:
    value = json.loads((DOCS / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(value)
    assert isinstance(value, dict)
    return value


def test_the_json_report_follows_its_published_schema(tmp_path: Path) -> None:
    foreign = write_foreign(tmp_path / "foreign", SPECFORGE | {"hidden_act": "gelu"}, {})
    problems = eagle3.wiring.check_checkpoint(foreign, target="kimi-k2.5")

    assert len(problems) > 10
    for report in (eagle3.wiring.render_json(problems), eagle3.wiring.render_json([])):
        jsonschema.validate(json.loads(report), schema("problems"))
    for broken in ({"ok": True}, json.loads(eagle3.wiring.render_json([])) | {"format_version": 2}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema("problems"))


@pytest.mark.parametrize(("target", "wanted"), [("kimi-k2.5", "2,30,58"), ("llama-3.1-8b", "-1,2,31")])
def test_the_json_of_explain_follows_its_published_schema(target: str, wanted: str) -> None:
    rows = json.loads(eagle3.wiring.render_explain(eagle3.wiring.explain(target, wanted), as_json=True))

    jsonschema.validate(rows, schema("explain"))
    assert rows


def test_the_workflow_in_the_docs_checks_a_checkpoint(tmp_path: Path) -> None:
    workflow = yaml.safe_load((DOCS / "wiring-check.yml").read_text(encoding="utf-8"))
    script = workflow["jobs"]["check"]["steps"][-1]["run"].split("<<'EOF'\n")[1].split("EOF")[0]
    checkpoint = write_checkpoint(tmp_path / "checkpoints/kimi-k2.5")

    def run() -> tuple[int, bool]:
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout)["ok"]

    assert run() == (0, True)
    (checkpoint / "model.safetensors").unlink()
    assert run() == (2, False)


def test_the_examples_in_the_docs_pass_and_fail_where_they_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "wiring.md").read_text(encoding="utf-8")
    code = page.split("### In a test suite")[1].split("```python\n")[1].split("```")[0]
    namespace: dict[str, Callable[[], None]] = {}
    exec(code, namespace)
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "checkpoints/kimi-k2.5")

    namespace["test_the_drafter_is_wired_for_the_server_we_run"]()
    (tmp_path / "checkpoints/kimi-k2.5/config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ProblemsError):
        namespace["test_the_drafter_is_wired_for_the_server_we_run"]()
    with pytest.raises(AssertionError):
        namespace["test_the_public_drafter_has_only_known_problems"]()

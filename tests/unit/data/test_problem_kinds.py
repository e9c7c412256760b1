"""The section on stores in docs/problem-kinds.md against the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = (
    "argmax_check",
    "store_check",
    "store_verify",
    "verify_record",
    "store_repair",
    "store_inspect",
    "store_build",
    "store_merge",
    "store_split",
    "remote_files",
    "remote_folder",
    "remote_store",
    "remote_copy",
    "remote_verify",
    "cache_order",
    "piece_cache",
    "open_reader",
)
COMMANDS = ("verify", "inspect", "merge", "split", "remote", "cache.")
KIND = re.compile(r"(store|disk|verify|inspect|merge|split|remote|cache)\.[a-z_]+")


def kinds_in_code() -> set[str]:
    """Literal kinds, and the second parts that are put behind `store.`."""
    found = set()
    for path in [
        *(ROOT / f"eagle3/data/{name}.py" for name in MODULES),
        ROOT / "eagle3/cli/data.py",
        ROOT / "eagle3/files.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and KIND.fullmatch(node.value):
                found.add(node.value)
    return found


def test_every_kind_of_the_stores_commands_is_documented_and_no_other() -> None:
    section = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8").split("\n## Stores\n")[1]
    documented = set(re.findall(r"`([a-z]+\.[a-z_]+)`", section))
    code = kinds_in_code()
    assert len(code) > 10 and code <= documented
    assert {kind for kind in documented if kind.startswith(COMMANDS)} <= code


def test_every_kind_of_an_import_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(import\.[a-z_]+)`", text))
    sources = [*(ROOT / "eagle3/data/imports").glob("*.py"), *(ROOT / "eagle3/target").glob("import_*.py")]
    code = {kind for path in sources for kind in re.findall(r'"(import\.[a-z_]+)"', path.read_text(encoding="utf-8"))}
    # `faults` and `state_fault` give the second parts.
    code |= {f"import.{kind}" for kind in FAULTS}
    faults = (ROOT / "eagle3/data/imports/sample.py").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:yield|return) "([a-z_]+)"', faults)) == FAULTS
    assert documented == code


FAULTS = {"shape", "width", "length", "too_long", "dtype", "vocabulary", "not_text", "loss_mask", "non_finite"}


def test_every_kind_of_a_ring_is_documented_and_no_other() -> None:
    section = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8").split("\n## Rings\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(ring\.[a-z_]+)`", section))
    code = set()
    for path in ROOT.glob("eagle3/*/*ring*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Problem", "problem_error"):
                kind = node.args[1]
                code |= {kind.value} if isinstance(kind, ast.Constant) else set()
    found = {kind for kind in code if kind.startswith("ring.")}
    assert len(found) > 15 and found == documented - {"ring.wait_seconds"}


def test_every_kind_of_a_warm_start_is_documented_and_no_other() -> None:
    section = (
        (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8").split("\n## Warm starts\n")[1].split("\n## ")[0]
    )
    documented = set(re.findall(r"`(init\.[a-z_]+)`", section))
    sources = [ROOT / "eagle3/serve/given_draft.py", *(ROOT / "eagle3/train").glob("warm_*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    sizes = ("hidden_size", "target_hidden_size", "vocab_size", "num_aux")  # what `init.{name}` is put together from
    assert 'f"init.{name}"' in text and all(f'        "{name}": (shape.' in text for name in sizes)
    assert documented == set(re.findall(r'"(init\.[a-z_]+)"', text)) | {f"init.{name}" for name in sizes}


def test_every_kind_of_conversations_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Conversations\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`((?:conversations|chat|show)\.[a-z_]+)`", section))
    paths = [*(ROOT / "eagle3/data").glob("*/*.py"), *(ROOT / "eagle3/data").glob("*.py")]
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    code = {
        kind for source in sources.values() for kind in re.findall(r'"((?:conversations|chat|show)\.[a-z_]+)"', source)
    }
    # A fault gives the second part.
    faults = [
        source for path, source in sources.items() if path.parent.name == "formats" or path.stem == "conversations"
    ]
    for source in faults:
        code |= {
            f"conversations.{kind}"
            for kind in re.findall(r'(?:append\(|return |\[|else )\(?"([a-z_]+)", (?:f?"|text)', source)
        }
    assert len(code) > 30 and code == documented


def test_every_kind_of_a_vocab_file_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Draft vocabs\n")[1].split("\n## ")[0]
    paths = ("data/vocab_file.py", "target/vocab.py", "cli/vocab.py", "train/setup.py", "draft/vocab.py")
    sources = "".join((ROOT / "eagle3" / path).read_text(encoding="utf-8") for path in paths)
    code = set(re.findall(r'"((?:draft_)?vocab\.[a-z_]+)"', sources)) - {"draft_vocab.d2t", "draft_vocab.t2d"}
    assert set(re.findall(r"`((?:draft_)?vocab\.[a-z_]+)`", section)) == code


def test_every_kind_of_a_regeneration_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Regeneration\n")[1].split("\n## ")[0]
    folder = ROOT / "eagle3/target"
    paths = [*folder.glob("answer_servers/*.py"), *folder.glob("regenerate*.py")]
    paths += [folder / "answer_file.py", folder / "dialogue.py"]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    code = set(re.findall(r'"((?:regenerate|server)\.[a-z_]+)"', sources))
    assert set(re.findall(r"`((?:regenerate|server)\.[a-z_]+)`", section)) - {"server.retries"} == code


def test_every_kind_of_evaluation_and_planning_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Evaluation and planning\n")[1].split("\n## ")[0]
    paths = [*ROOT.glob("eagle3/evaluate/*.py"), *ROOT.glob("eagle3/serve/planner/*.py"), ROOT / "eagle3/cli/work.py"]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    code = set(re.findall(r'"((?:evaluate|plan)\.[a-z_]+)"', sources)) - {"plan.device"}
    assert set(re.findall(r"`((?:evaluate|plan)\.[a-z_]+)`", section)) == code and len(code) > 5


def test_every_kind_of_launching_and_waiting_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Servers\n")[1].split("\n## ")[0]
    paths = [
        *ROOT.glob("eagle3/serve/launch/*.py"),
        *ROOT.glob("eagle3/serve/wait/*.py"),
        ROOT / "eagle3/cli/serve_launch.py",
    ]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    code = set(re.findall(r'"((?:launch|start)\.[a-z_]+)"', sources))
    code |= {f"start.{kind}" for kind in re.findall(r'_cause\(\s*"([a-z_]+)"', sources)}  # the table of causes
    assert set(re.findall(r"`((?:launch|start)\.[a-z_]+)`", section)) == code and len(code) > 30


def test_every_kind_of_measuring_servers_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Measuring servers\n")[1].split("\n## ")[0]
    paths = [*ROOT.glob("eagle3/serve/bench/*.py"), *ROOT.glob("eagle3/serve/sweep/*.py")]
    paths += [ROOT / "eagle3/cli/serve_bench.py", ROOT / "eagle3/cli/serve_sweep.py"]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert 'f"bench.{kind}"' in sources
    files = {"bench.lock", "bench.json", "sweep.lock", "sweep.json"}
    code = set(re.findall(r'"((?:bench|sweep)\.[a-z_]+)"', sources)) - files
    code |= {f"bench.{kind}" for kind in re.findall(r'add\("([a-z_]+)"', sources)}
    assert set(re.findall(r"`((?:bench|sweep)\.[a-z_]+)`", section)) == code and len(code) > 10

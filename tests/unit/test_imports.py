"""Who may import whom, and what `import eagle3.wiring` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "eagle3"

# A room may import itself, rooms of its own row and of the rows before it.
ROWS = (
    ("errors", "files", "sealed"),
    ("wiring",),
    ("draft",),
    ("progress", "config", "provenance"),
    ("data", "target"),
    ("train", "evaluate", "serve"),
    ("cli", "demo"),
)
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
BASE = {"errors", "files", "sealed", "progress", "config", "provenance"}

# Third-party packages that only some files may import (paths inside eagle3/; a folder ends in a slash).
ONLY_IN = {
    "accelerate": ("train/",),
    "transformers": ("target/", "data/chat/", "evaluate/decode/"),
    "triton": ("draft/kernels/", "target/streaming/kernels/", "train/kernels/"),
    "wandb": ("train/",),
    "tensorboard": ("train/",),
    "sglang": (),
    "vllm": (),
}
STANDARD_LIBRARY_ONLY = ("errors.py", "files.py", "sealed.py", "wiring/")
LAZY_TORCH = "wiring/fingerprint.py"  # inside its functions; importing it loads nothing (below)
TORCH_ONLY = ("draft/",)

IMPORT_SECONDS = 0.1
LOOP_SECONDS = 0.018


def imported_names(source: str, module: str) -> Iterator[str]:
    """Dotted names of everything that a module's source imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.rsplit(".", node.level)[0] + "." if node.level else ""
            yield from (f"{base}{node.module or ''}.{alias.name}".replace("..", ".") for alias in node.names)


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def violations(files: dict[str, str]) -> list[str]:
    """Every import that breaks a rule; `files` maps paths inside eagle3/ to their source."""
    found = []
    for path, source in files.items():
        module = "eagle3." + path.removesuffix(".py").replace("/", ".")
        for name in imported_names(source, module):
            if reason := _violation(path, name):
                found.append(f"{path} imports {name}: {reason}")
    return found


def _violation(path: str, name: str) -> str:
    room, root = room_of(path), name.split(".")[0]
    if root == "eagle3":
        other = name.removeprefix("eagle3.").split(".")[0]
        if other == "__version__":
            return ""
        if other not in ROW_OF or room not in ROW_OF:
            return "this room has no place in ROWS"
        if room in BASE and other not in BASE:
            return "a base module imports base modules only"
        return "" if ROW_OF[other] <= ROW_OF[room] else "it points against the direction of imports"
    if root in sys.stdlib_module_names:
        return ""
    if path == LAZY_TORCH and root == "torch":
        return ""
    if path.startswith(STANDARD_LIBRARY_ONLY) or path == "__init__.py":
        return "standard library only"
    if path.startswith(TORCH_ONLY) and root not in ("torch", "triton"):
        return "torch only"
    if root in ONLY_IN and not path.startswith(ONLY_IN[root]):
        return f"only in {', '.join(ONLY_IN[root]) or 'nothing'}"
    return ""


def test_the_whole_package_keeps_the_direction_of_imports() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

    assert len(files) > 20
    assert violations(files) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("wiring/x.py", "import torch"),
        ("wiring/fingerprint.py", "import numpy"),
        ("wiring/x.py", "from eagle3.draft.vocab import DraftVocab"),
        ("wiring/x.py", "from eagle3.progress import progress"),
        ("wiring/x.py", "from eagle3 import config"),
        ("wiring/x.py", "from ..draft import vocab"),
        ("wiring/x.py", "def f():\n    import numpy"),
        ("draft/x.py", "import numpy as np"),
        ("draft/x.py", "from eagle3.config import Section"),
        ("draft/x.py", "from eagle3.data import store"),
        ("files.py", "from eagle3.wiring import layers"),
        ("config.py", "from eagle3.wiring import layers"),
        ("data/x.py", "from eagle3.train.trainer import run_training"),
        ("data/x.py", "from accelerate import Accelerator"),
        ("data/x.py", "import transformers"),
        ("train/x.py", "from eagle3.cli import main"),
        ("train/x.py", "from transformers import AutoModel"),
        ("train/x.py", "import triton"),
        ("draft/x.py", "import triton"),
        ("serve/x.py", "import sglang"),
        ("evaluate/x.py", "from vllm import LLM"),
        ("newroom/x.py", "from eagle3.errors import Problem"),
        ("__init__.py", "import torch"),
    ],
)
def test_each_rule_can_be_broken(path: str, line: str) -> None:
    assert len(violations({path: line})) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("wiring/x.py", "import json\nfrom eagle3.errors import Problem\nfrom eagle3.files import read_json"),
        ("wiring/x.py", "from . import layers\nfrom .layers import LayerWiring"),
        ("draft/x.py", "import torch.nn.functional as F\nfrom eagle3.wiring import LayerWiring"),
        ("data/x.py", "from eagle3.progress import progress\nfrom eagle3.config import TargetConfig\nimport numpy"),
        ("data/chat/", "from transformers import AutoTokenizer"),
        ("target/families/x.py", "import transformers\nfrom eagle3.data.store import StoreWriter"),
        ("train/kernels/x.py", "import triton.language as tl"),
        ("train/x.py", "import accelerate\nfrom eagle3 import __version__"),
        ("cli.py", "from eagle3.train.trainer import run_training\nimport typer"),
    ],
)
def test_what_is_allowed_is_allowed(path: str, line: str) -> None:
    assert violations({path: line}) == []


def in_a_fresh_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_wiring_takes_under_a_tenth_of_a_second() -> None:
    """On two idle cores, where the loop takes `LOOP_SECONDS`; a machine that is slow or busy is slow at both."""
    code = (
        "import time; start = time.process_time(); sum(i * i for i in range(300_000)); loop = time.process_time();"
        "import eagle3.wiring; print((time.process_time() - loop) / (loop - start))"
    )

    loops = [float(in_a_fresh_interpreter(code)) for _ in range(5)]

    assert min(loops) * LOOP_SECONDS < IMPORT_SECONDS


def test_importing_wiring_loads_no_third_party_module() -> None:
    modules = "eagle3.wiring, eagle3.wiring.fingerprint, eagle3.wiring.probe_report, eagle3.wiring.fingerprint_check"
    code = f"import sys; before = set(sys.modules); import {modules}; print(*(set(sys.modules) - before))"

    loaded = {name.split(".")[0] for name in in_a_fresh_interpreter(code).split()}

    assert "eagle3" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"eagle3"}


def test_a_training_process_does_not_wait_for_transformers_or_torchs_sharding() -> None:
    heavy = ("transformers", "torch.distributed.tensor", "torch.distributed.fsdp")
    code = f"import sys, eagle3.train.trainer; print(*(name for name in {heavy} if name in sys.modules))"

    assert in_a_fresh_interpreter(code).split() == []

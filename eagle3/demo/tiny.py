"""`eagle3 tiny-kimi`: everything that configs/tiny-kimi starts from."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3.data.tensor_file import plain_os_errors
from eagle3.errors import Problem, raise_problems
from eagle3.files import atomic_folder, refuse_url, write_text_atomic
from eagle3.target.tiny import make_tiny_kimi

_PROMPTS = 24


def make_tiny_kimi_folder(folder: Path) -> str:
    """Writes `target` (a random Kimi-K2.5 of 61 layers) and `prompts.jsonl` into `folder`; says what it wrote.

    Raises:
        ProblemsError: kind `tiny.output`, what is there is not from this command; or the folder cannot be written.
    """
    refuse_url(folder, "the output", "give a folder")
    target, prompts = folder / "target", folder / "prompts.jsonl"
    records = [
        {"id": f"prompt-{number}", "messages": [{"role": "user", "content": f"What is {number} plus {number + 1}?"}]}
        for number in range(_PROMPTS)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    with atomic_folder(target) as temporary, plain_os_errors(target):
        make_tiny_kimi(temporary)
        raise_problems(_foreign_target(target, temporary) + _foreign_prompts(prompts, text))
    write_text_atomic(prompts, text)
    return f"wrote {target} and {prompts}"


def _foreign_target(target: Path, ours: Path) -> list[Problem]:
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    config = "config.json"
    extra = names - {path.name for path in ours.iterdir()}
    same = config in names and (target / config).read_bytes() == (ours / config).read_bytes()
    return [] if not target.exists() or not names or (same and not extra) else [_foreign(target)]


def _foreign_prompts(prompts: Path, ours: str) -> list[Problem]:
    same = not prompts.exists() or (prompts.is_file() and prompts.read_bytes() == ours.encode())
    return [] if same else [_foreign(prompts)]


def _foreign(path: Path) -> Problem:
    message = "is there, and is not what this command writes"
    return Problem(str(path), "tiny.output", message, "choose another --output, or move it away")

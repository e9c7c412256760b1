"""`eagle3 tiny-kimi`: everything that configs/tiny-kimi starts from."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3.files import write_text_atomic
from eagle3.target.tiny import make_tiny_kimi

_PROMPTS = 24


def make_tiny_kimi_folder(folder: Path) -> str:
    """Writes `target` (a random Kimi-K2.5 of 61 layers) and `prompts.jsonl` into `folder`; says what it wrote."""
    make_tiny_kimi(folder / "target")
    records = [
        {"id": f"prompt-{number}", "messages": [{"role": "user", "content": f"What is {number} plus {number + 1}?"}]}
        for number in range(_PROMPTS)
    ]
    write_text_atomic(folder / "prompts.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    return f"wrote {folder / 'target'} and {folder / 'prompts.jsonl'}"

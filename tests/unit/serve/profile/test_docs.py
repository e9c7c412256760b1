"""docs/profile.md and the section of docs/problem-kinds.md, against the code."""

from __future__ import annotations

import re
from pathlib import Path

from eagle3.serve.profile.phases import PARTS
from eagle3.serve.profile.report import PART_WORDS

ROOT = Path(__file__).parents[4]


def test_every_kind_of_a_profile_is_documented_and_no_other() -> None:
    text = (ROOT / "docs/problem-kinds.md").read_text(encoding="utf-8")
    section = text.split("\n## Profiles\n")[1].split("\n## ")[0]
    paths = [*ROOT.glob("eagle3/serve/profile/*.py"), ROOT / "eagle3/cli/serve_profile.py"]
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    code = {kind for source in sources.values() for kind in re.findall(r'"((?:trace|profile)\.[a-z_]+)"', source)}
    reader = sources[ROOT / "eagle3/serve/profile/trace_file.py"]
    code |= {f"trace.{kind}" for kind in re.findall(r'_wrong\("([a-z]+)"', reader)}
    assert len(code) > 12
    assert set(re.findall(r"`((?:trace|profile)\.[a-z_]+)`", section)) == code


def test_every_part_is_in_the_documented_table() -> None:
    table = (ROOT / "docs/profile.md").read_text(encoding="utf-8").split("\n## The parts\n")[1].split("\n\n")[0]
    documented = re.findall(r"^\| ([a-zA-Z ]+) \|", table, re.MULTILINE)[1:]
    assert len(documented) == len(PARTS)
    for words in PART_WORDS.values():
        assert any(words.startswith(name) for name in documented), words

"""The families of targets, one small file each. A new family is a file here and a line in `_SPECS`."""

from __future__ import annotations

from eagle3.errors import problem_error
from eagle3.target.families.deepseek import DEEPSEEK
from eagle3.target.families.gpt_oss import GPT_OSS
from eagle3.target.families.kimi import KIMI_K2, KIMI_K25
from eagle3.target.families.llama import LLAMA
from eagle3.target.families.qwen import QWEN
from eagle3.target.spec import TargetSpec

_SPECS = (LLAMA, QWEN, DEEPSEEK, KIMI_K2, KIMI_K25, GPT_OSS)
SPECS: dict[str, TargetSpec] = {model_type: spec for spec in _SPECS for model_type in spec.model_types}


def find_spec(model_type: object, where: str) -> TargetSpec:
    """The spec of a config.json's `model_type`.

    Raises:
        ProblemsError: kind `target.unsupported`, naming the types that are supported.
    """
    if isinstance(model_type, str) and model_type in SPECS:
        return SPECS[model_type]
    message = f"model_type is {model_type!r}, supported are {', '.join(sorted(SPECS))}"
    raise problem_error(where, "target.unsupported", message, "add a TargetSpec to eagle3/target/families")

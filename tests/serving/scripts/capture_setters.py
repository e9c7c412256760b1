"""What SGLang's own `set_eagle3_layers_to_capture` makes of layer ids, on stand-ins for the models.

Request: `[family, number of layers, ids]` each. Reply: `layers_to_capture` each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeModel

TARGETS: dict[str, Any] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen2_moe": Qwen2MoeForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "deepseek": DeepseekV3ForCausalLM,
    "kimi_k25": KimiK25ForConditionalGeneration,
}


def captured(family: str, num_hidden_layers: int, ids: list[int]) -> list[int]:
    layers = [SimpleNamespace() for _ in range(num_hidden_layers + 3)]  # room for ids past the end
    stack = SimpleNamespace(layers=layers, layers_to_capture=[])
    stack.set_eagle3_layers_to_capture = bound(Qwen3MoeModel, stack)
    target = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=num_hidden_layers),
        pp_group=SimpleNamespace(is_last_rank=True),
        model=stack,
    )
    if family == "kimi_k25":
        target.set_eagle3_layers_to_capture = bound(DeepseekV3ForCausalLM, target)
        target = SimpleNamespace(language_model=target)
    bound(TARGETS[family], target)(ids)
    assert [hasattr(layer, "_is_layer_to_capture") for layer in layers] == (
        [number in stack.layers_to_capture for number in range(len(layers))]
        if family.endswith("_moe")
        else [False] * len(layers)
    )
    return list(stack.layers_to_capture)


def bound(owner: Any, instance: SimpleNamespace) -> Callable[[list[int]], None]:
    return lambda ids: owner.set_eagle3_layers_to_capture(instance, ids)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([captured(*item) for item in asked]), encoding="utf-8")

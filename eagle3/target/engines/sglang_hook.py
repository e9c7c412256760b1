"""Runs inside SGLang: lets a server that returns aux hidden states return the last hidden states beside them.

SGLang 0.5.23 keeps the post-norm last hidden states of every token where it captures aux states without a drafter, but
copies only the aux states into its answers. The server's own option puts this hook on the module that has both:

    --forward-hooks '[{"target_modules": ["*logits_processor"],
                       "hook_factory": "eagle3.target.engines.sglang_hook:with_last_hidden_states"}]'

The server's Python must be able to import this file; it needs nothing but the torch that is there.
Source: `sglang/srt/layers/logits_processor.py`, `LogitsProcessorOutput.last_hidden_states`;
`sglang/srt/model_executor/hook_manager.py`.

Legend: T tokens of a batch, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HOOK = "eagle3.target.engines.sglang_hook:with_last_hidden_states"


def with_last_hidden_states(config: object) -> Callable[[Any, Any, Any], Any]:
    """The hook, for `--forward-hooks`: answers carry [T, A * H + H], the last hidden states after the aux states."""
    return _append


def _append(module: Any, inputs: Any, output: Any) -> Any:
    if output.hidden_states is not None and output.last_hidden_states is not None:
        output.hidden_states = torch.cat([output.hidden_states, output.last_hidden_states], dim=-1)
    return output

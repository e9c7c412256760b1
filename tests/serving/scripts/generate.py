"""A whole SGLang engine: greedy answers to prompts of token ids, with or without a drafter.

Request: `target`, `prompts` (lists of token ids), `max_new_tokens` (one number, or one for each); optional
`drafters` (folders), `steps` (3), `options` (more arguments of the engine). Reply: for each drafter (or for none) a
list with, for each prompt, `output_ids` and SGLang's `meta_info`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import on_cpu  # noqa: F401
import sglang


def answers(request: dict[str, Any], drafter: str | None) -> list[dict[str, Any]]:
    options: dict[str, Any] = {
        "model_path": request["target"],
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "intel_amx",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "log_level": "warning",
    }
    if drafter is not None:
        steps = request.get("steps", 3)
        options |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": drafter,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": steps + 1,
        }
    count = request["max_new_tokens"]
    counts = [count] * len(request["prompts"]) if isinstance(count, int) else count
    sampling = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in counts]
    running = sglang.Engine(**options | request.get("options", {}))
    try:
        replies = running.generate(input_ids=request["prompts"], sampling_params=sampling)
    finally:
        running.shutdown()
    return [{"output_ids": reply["output_ids"], "meta_info": reply["meta_info"]} for reply in replies]


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = [answers(job, drafter) for drafter in job.get("drafters") or [None]]
    Path(sys.argv[2]).write_text(json.dumps(found, default=str), encoding="utf-8")

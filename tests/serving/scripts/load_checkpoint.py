"""What SGLang's own loader makes of checkpoints, starting from parameters that are all NaN.

Request: `target` (any model folder, for the process's settings) and `cases`, each with `checkpoint`, `dtype`, `save`
and optionally `embedding` (a safetensors file with the target's `embed_tokens.weight`, put in as the EAGLE worker
does after loading). Each case's parameters, and `hot_token_id` if there is one, are saved as safetensors. Reply: for
each case the error that the loader raised, or null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from real_drafter import build, start_alone, stored_weights
from safetensors.torch import load_file, save_file


def load(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build(case["checkpoint"], getattr(torch, case["dtype"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.load_weights(stored_weights(case["checkpoint"]))
    if "embedding" in case:
        embedding = load_file(case["embedding"])["embed_tokens.weight"].to(getattr(torch, case["dtype"]))
        model.set_embed(torch.nn.Parameter(embedding, requires_grad=False))
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if model.hot_token_id is not None:
        loaded["hot_token_id"] = model.hot_token_id
    return loaded


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start_alone(request["target"])
    errors: list[str | None] = []
    for case in request["cases"]:
        try:
            save_file(load(case), case["save"])
            errors.append(None)
        except (AssertionError, RuntimeError, ValueError) as error:
            errors.append(repr(error))
    Path(sys.argv[2]).write_text(json.dumps(errors), encoding="utf-8")

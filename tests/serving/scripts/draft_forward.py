"""SGLang's own drafter run by hand over one sequence: the prefill, then one draft step after another.

Everything is the real model's but the attention kernel and the KV cache, which are a list here.

Request: `target` and `cases`, each with `checkpoint`, `inputs` (a safetensors file with `tokens` [T], `aux` [T, A * H]
and `embed_tokens.weight`), `starts` (chain positions), `steps` (K) and `save`. Saved for each start: `logits.START`
[K, D] and `states.START` [K, H], what is handed to the next step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from real_drafter import build, start_alone, stored_weights
from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from torch.nn import functional as F


class ListCache:
    """An attention backend: plain causal attention over everything it was given so far."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *_: object, **__: object
    ) -> torch.Tensor:
        self.keys += k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        self.values += v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        rows = (part.transpose(0, 1) for part in (queries, keys, values))
        attended = F.scaled_dot_product_attention(*rows, attn_mask=seen, scale=layer.scaling, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1)


def step(
    model: LlamaForCausalLMEagle3, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, prefill: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last row's logits [D] and the state [H] that it hands on."""
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(hidden_states=states),
        mm_input_embeds=None,
        forward_mode=ForwardMode.EXTEND if prefill else ForwardMode.DECODE,
        contains_mm_inputs=lambda: False,
        global_num_token_non_padded_cpu=None,
    )
    output, handed_on = model.model(ids, positions, batch)
    head = model.lm_head.weight[: model.config.draft_vocab_size]
    return F.linear(output[-1], head), handed_on[0][-1]


@torch.no_grad()
def chain(
    model: LlamaForCausalLMEagle3, tokens: torch.Tensor, aux: torch.Tensor, start: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [K, D] and states [K, H] of the chain that starts from the state of token `start`."""
    logits, states = [], []
    with forward_context(ForwardContext(attn_backend=ListCache())):
        read, state = step(model, tokens[1 : start + 2], torch.arange(start + 1), aux[: start + 1], prefill=True)
        for depth in range(steps):
            logits.append(read)
            states.append(state)
            at = start + 1 + depth
            if depth + 1 < steps:
                ids, positions = tokens[at + 1 : at + 2], torch.tensor([at])
                read, state = step(model, ids, positions, state[None], prefill=False)
    return torch.stack(logits), torch.stack(states)


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start_alone(request["target"])
    for case in request["cases"]:
        inputs, found = load_file(case["inputs"]), {}
        drafter = build(case["checkpoint"])
        drafter.load_weights(stored_weights(case["checkpoint"]))
        drafter.set_embed(torch.nn.Parameter(inputs["embed_tokens.weight"], requires_grad=False))
        for start in case["starts"]:
            logits, states = chain(drafter, inputs["tokens"], inputs["aux"], start, case["steps"])
            found |= {f"logits.{start}": logits, f"states.{start}": states}
        save_file(found, case["save"])
    Path(sys.argv[2]).write_text("null", encoding="utf-8")

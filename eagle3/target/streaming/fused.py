"""Fast forms of a decoder layer's parts: they replace the `forward` of Transformers' own modules.

Each uses the module's weights and computes what the module computes, in the same types and with the same roundings but
for the order of sums. Modules that are not known here keep their own `forward`.

Legend: T tokens, K experts of a token, E experts, H hidden, N heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from eagle3.target.streaming.moe import ExpertGroup, mixture, swiglu
from eagle3.target.streaming.packing import current

Groups = Callable[[], Iterable[ExpertGroup]]

_NORMS = {"DeepseekV3RMSNorm", "LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"}
_MLPS = {"DeepseekV3MLP", "LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP"}
_EXPERTS = {"DeepseekV3Experts", "Qwen3MoeExperts"}
_KERNEL_WIDTHS = (16, 32, 64, 128)


def find_experts(layer: nn.Module) -> list[tuple[str, Any]]:
    """The layer's modules of fused SwiGLU experts (at most one in the families known), by name."""
    return [(name, module) for name, module in layer.named_modules() if _is(module, _EXPERTS, nn.SiLU)]


def fuse(layer: nn.Module, groups: Groups, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces what can be: the experts everywhere; on a GPU in a 16-bit type also norms, MLPs, routing and MLA.

    Args:
        layer: whose weights may still be absent.
        groups: gives the weights of the layer's experts, when it runs.
        device, dtype: that it will run in.
    """
    for _, experts in find_experts(layer):
        _replace(experts, partial(_experts, groups, experts.num_experts))
    if device.type != "cuda" or dtype == torch.float32:
        return
    for module in layer.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            _replace(module, partial(_norm, module))
        elif _is(module, _MLPS, nn.SiLU):
            _replace(module, partial(_mlp, module))
        elif kind == "DeepseekV3MoE" and _is(module.experts, _EXPERTS, nn.SiLU):
            _replace(module, partial(_deepseek_moe, groups, module))
        elif kind == "DeepseekV3Attention" and _fits(module):
            _replace(module, partial(_latent_attention, module))


@contextmanager
def unfused(layer: nn.Module, experts_too: bool) -> Iterator[None]:
    """Transformers' own code while it lasts, of the experts only if asked for."""
    kept = {} if experts_too else dict(find_experts(layer))
    replaced = {
        module: vars(module).pop("forward")
        for module in layer.modules()
        if "forward" in vars(module) and module not in kept.values()
    }
    try:
        yield
    finally:
        for module, forward in replaced.items():
            _replace(module, forward)


def _is(module: Any, kinds: set[str], activation: type[nn.Module]) -> bool:
    # Transformers' table of activations gives its own class of the same function.
    return type(module).__name__ in kinds and type(module.act_fn).__name__ in (activation.__name__, "SiLUActivation")


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    vars(module)["forward"] = forward


def _experts(
    groups: Groups, count: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return mixture(hidden_states, top_k_index, top_k_weights, groups(), count)


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    from eagle3.target.streaming.kernels.norm import rms_norm

    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = module.down_proj(swiglu(module.gate_proj(rows), module.up_proj(rows)))
    return out.view(x.shape)


def _deepseek_moe(groups: Groups, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    weights, index = _deepseek_routing(module.gate, rows)
    shared = module.shared_experts(rows)
    return mixture(rows, index, weights, groups(), module.experts.num_experts, shared).view(hidden_states.shape)


def _deepseek_routing(gate: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token, [T, K]; without groups of experts in one product with float32 sums."""
    narrow = gate.weight.to(rows.dtype)
    if gate.num_group != 1 or not torch.equal(narrow.to(gate.weight.dtype), gate.weight):
        _, weights, index = gate(rows)
        return weights, index
    scores = torch.mm(rows, narrow.t(), out_dtype=torch.float32).sigmoid_()
    index = torch.topk(scores + gate.e_score_correction_bias, gate.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * gate.routed_scaling_factor, index


def _fits(module: Any) -> bool:
    widths = (module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim)
    return bool(module.config.rope_interleave) and all(width in _KERNEL_WIDTHS for width in widths)


def _latent_attention(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
) -> tuple[torch.Tensor, None]:
    """Multi-head latent attention of packed documents; the rotary part of the keys is never copied per head."""
    from eagle3.target.streaming.kernels.attention import packed_attention
    from eagle3.target.streaming.kernels.rope import rotate_pairs

    states = hidden_states[0]
    cos, sin = (table.expand(1, *table.shape[1:])[0] for table in position_embeddings)
    own, rotary = module.qk_nope_head_dim, module.qk_rope_head_dim
    if module.q_lora_rank is None:
        query = module.q_proj(states)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(states)))
    query = query.view(len(states), module.num_heads, own + rotary)
    rotate_pairs(query[..., own:], cos, sin)
    latent, shared_key = module.kv_a_proj_with_mqa(states).split([module.kv_lora_rank, rotary], dim=-1)
    rotate_pairs(shared_key.unsqueeze(1), cos, sin)
    keys = module.kv_b_proj(module.kv_a_layernorm(latent)).view(len(states), module.num_heads, -1)
    key, value = keys.split([own, module.v_head_dim], dim=-1)
    mixed = packed_attention(query, key, value, shared_key, current().tiles, module.scaling)
    return module.o_proj(mixed.flatten(1)).unsqueeze(0), None

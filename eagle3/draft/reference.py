"""The draft model as serving runs it, written a second time: slow, in plain loops, for tests.

One document, one chain, one token at a time, with the key/value cache as a list. Shares no code with the model, its
attention, its rotary embedding or its unroll. It follows EAGLE-3 (arXiv 2503.01840) as SGLang computes
`LlamaForCausalLMEagle3` (sglang/srt/models/llama_eagle3.py); the precision is that of the tensors given.

Shapes: T tokens, A aux layers, H hidden, D draft vocab, K steps, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from eagle3.draft.config import DraftConfig, LossKind, RopeConfig

State = Mapping[str, torch.Tensor]


def draft_logits(
    state: State, config: DraftConfig, aux: torch.Tensor, tokens: torch.Tensor, start: int, steps: int
) -> torch.Tensor:
    """Draft logits [K, D] of the chain that starts from the state of token `start`.

    The document's tokens 0 .. start are prefilled, each state beside the token after it; then each draft step feeds
    the previous output and the next of `tokens` (teacher forcing: `tokens` stand for what was drafted).

    Args:
        state: weights by SGLang's names, the embedding included.
        config: the draft model's shape.
        aux: [T, A * H], the document's aux hidden states; those after `start` are not read.
        tokens: int64 [T], the document's tokens; read up to start + steps.
        start: the chain's own token.
        steps: K.
    """
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in range(start + 1):
        hidden = state["fc.weight"] @ _fc_input(state, config, aux[position])
        output = _layer(state, config, cache, hidden, tokens[position + 1], position)
    logits = []
    for step in range(steps):
        normed = _norm(output, state["norm.weight"], config.rms_norm_eps)
        logits.append(state["lm_head.weight"] @ normed)
        if step + 1 < steps:
            hidden = normed if config.norm_output else output
            output = _layer(state, config, cache, hidden, tokens[start + 2 + step], start + 1 + step)
    return torch.stack(logits)


def term_loss(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    kind: LossKind,
    weight: float = 1.0,
    eta: float = 3.0,
    top_k: int | None = None,
) -> torch.Tensor:
    """Loss of one term, token by token, by the words of docs/training-step.md; autograd gives its slope.

    Args:
        logits: [D], the draft's.
        teacher: [D], the target's on the draft vocab.
        kind: which loss.
        weight, eta: of `lk_lambda`.
        top_k: how many of the teacher's greatest tokens it has; those equal to the last of them stay, too.
    """
    ranked = sorted((float(value) for value in teacher), reverse=True)
    least = ranked[-1] if top_k is None else ranked[min(top_k, len(ranked)) - 1]
    taught = [token for token in range(len(teacher)) if float(teacher[token]) >= least]
    total = sum((teacher[token] - ranked[0]).exp() for token in taught)
    p = {token: (teacher[token] - ranked[0]).exp() / total for token in taught}
    greatest = float(logits.detach().max())
    mass = sum((value - greatest).exp() for value in logits)
    q = [(value - greatest).exp() / mass for value in logits]
    zero = logits.sum() * 0
    if kind == "cross_entropy":
        return zero - sum(p[token] * q[token].log() for token in taught)
    if kind == "kl":
        return zero + sum(p[token] * (p[token] / q[token]).log() for token in taught)
    if kind == "reverse_kl":
        share = sum(q[token] for token in taught)
        return sum(q[token] / share * (q[token] / share / p[token]).log() for token in taught) - share.log()
    accepted = sum(q[token] if q[token] < p[token] else p[token] for token in taught) + zero
    if kind == "lk_alpha":
        return -accepted.log()
    assert kind == "lk_lambda"
    blend = weight * math.exp(-eta * float(accepted.detach()))
    variation = sum((p.get(token, zero) - q[token]).abs() for token in range(len(q))) / 2
    return blend * sum(p[token] * (p[token] / q[token]).log() for token in taught) + (1 - blend) * variation


def _fc_input(state: State, config: DraftConfig, aux: torch.Tensor) -> torch.Tensor:
    """One token's aux hidden states [A * H] as `fc` reads them."""
    if config.norm_before_fc:
        aux = _norm(aux, state["input_norm.weight"], config.rms_norm_eps)
    if not config.fc_norm:
        return aux
    width = config.target_hidden_size
    slots = [aux[slot * width : (slot + 1) * width] for slot in range(config.num_aux)]
    return torch.cat(
        [_norm(part, state[f"fc_norm.{slot}.weight"], config.rms_norm_eps) for slot, part in enumerate(slots)]
    )


def _layer(
    state: State,
    config: DraftConfig,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    token: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """One token through the decoder layer; its key and value join the cache."""

    def weight(name: str) -> torch.Tensor:
        return state[f"midlayer.{name}.weight"]

    embedded = _norm(state["embed_tokens.weight"][token], weight("input_layernorm"), config.rms_norm_eps)
    x = torch.cat([embedded, _norm(hidden, weight("hidden_norm"), config.rms_norm_eps)])
    query = (weight("self_attn.q_proj") @ x).view(config.num_attention_heads, config.head_dim)
    key = (weight("self_attn.k_proj") @ x).view(config.num_key_value_heads, config.head_dim)
    value = (weight("self_attn.v_proj") @ x).view(config.num_key_value_heads, config.head_dim)
    cache.append((torch.stack([_turned(head, config.rope, position) for head in key]), value))
    heads = []
    for number in range(config.num_attention_heads):
        shared = number // (config.num_attention_heads // config.num_key_value_heads)
        turned = _turned(query[number], config.rope, position)
        scores = torch.stack([turned @ keys[shared] / math.sqrt(config.head_dim) for keys, _ in cache])
        shares = (scores - scores.max()).exp()
        shares = shares / shares.sum()
        heads.append(sum(share * values[shared] for share, (_, values) in zip(shares, cache, strict=True)))
    hidden = hidden + weight("self_attn.o_proj") @ torch.cat(heads)
    normed = _norm(hidden, weight("post_attention_layernorm"), config.rms_norm_eps)
    gate = weight("mlp.gate_proj") @ normed
    return hidden + weight("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (weight("mlp.up_proj") @ normed))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _turned(head: torch.Tensor, rope: RopeConfig, position: int) -> torch.Tensor:
    """One head [d] rotated to a position; channel j pairs with j + d / 2."""
    half = len(head) // 2
    turned = list(head)
    for j in range(half):
        angle = position * _frequency(rope, j / half)
        turned[j] = head[j] * math.cos(angle) - head[j + half] * math.sin(angle)
        turned[j + half] = head[j + half] * math.cos(angle) + head[j] * math.sin(angle)
    return torch.stack(turned)


def _frequency(rope: RopeConfig, depth: float) -> float:
    """Radians a token of the channel pair at `depth` (0 .. 1) of the head."""
    frequency = 1 / rope.rope_theta**depth
    if rope.rope_type == "default":
        return frequency
    assert rope.factor
    if rope.rope_type == "linear":
        return frequency / rope.factor
    assert rope.rope_type == "llama3"
    assert rope.original_max_position_embeddings and rope.low_freq_factor and rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength > rope.original_max_position_embeddings / rope.low_freq_factor:
        return frequency / rope.factor
    if wavelength < rope.original_max_position_embeddings / rope.high_freq_factor:
        return frequency
    reach = rope.original_max_position_embeddings / wavelength
    smooth = (reach - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency

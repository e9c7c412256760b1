"""The draft model, computed as SGLang serves `LlamaForCausalLMEagle3` (sglang/srt/models/llama_eagle3.py).

    h = fc(aux)                                                  at step 0; later the previous step's h'
                                                                 (`norm_before_fc`, `fc_norm`: aux is normed first)
    x = concat(input_layernorm(embed(token)), hidden_norm(h))    [2H], into q, k and v
    h' = h + attention(x);  h' = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h'))

Parameter names are those that SGLang's loader reads. Architecture: EAGLE-3, arXiv 2503.01840.

Shapes: R rows, A aux layers, H hidden, D draft vocab, V target vocab, h query heads, v key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from eagle3.draft import init
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import rms_norm
from eagle3.draft.rope import rotate
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, raise_problems

Turn = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """See `rms_norm`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections; `eagle3.draft.attention.attend` is the attention itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def query(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """[R, h, d], rotated, of layer inputs [R, 2H]."""
        return rotate(self._heads(self.q_proj(x)), turn)

    def key_value(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, [R, v, d] each, of layer inputs [R, 2H]."""
        return rotate(self._heads(self.k_proj(x)), turn), self._heads(self.v_proj(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer, in the two halves around its attention."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What q, k and v read, [R, 2H], of token embeddings and states, [R, H] each."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """h' [R, H] of the layer's state [R, H] and its attention output [R, h, d]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftModel(nn.Module):
    """EAGLE-3's draft model of one layer; the embedding is the target's and frozen.

    Call `init_weights` and `init_from_target`, or `load_trainable_state`, before use.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        aux_width = config.num_aux * config.target_hidden_size
        self.input_norm = RMSNorm(aux_width, config.rms_norm_eps) if config.norm_before_fc else None
        slots = range(config.num_aux if config.fc_norm else 0)
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in slots)
        self.fc = nn.Linear(aux_width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens.requires_grad_(False)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Step 0's states [R, H] of aux hidden states [R, A * H]."""
        return self.fc(self.fc_input(aux))

    def fc_input(self, aux: torch.Tensor) -> torch.Tensor:
        """What `fc` reads [R, A * H] of aux hidden states [R, A * H]."""
        if self.input_norm is None and not self.fc_norm and torch.is_autocast_enabled(aux.device.type):
            return aux.to(torch.get_autocast_dtype(aux.device.type))
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm:
            slots = aux.chunk(self.config.num_aux, -1)
            aux = torch.cat([norm(slot) for norm, slot in zip(self.fc_norm, slots, strict=True)], -1)
        return aux

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Draft logits [R, D] of the layer's output h' [R, H]."""
        return self.lm_head(self.norm(output))

    def handed_on(self, output: torch.Tensor) -> torch.Tensor:
        """What the next draft step takes as its state, [R, H], of h' [R, H]."""
        return self.norm(output) if self.config.norm_output else output

    def init_weights(self, seed: int) -> None:
        """See `eagle3.draft.init.init_weights`."""
        init.init_weights(self, seed)

    def init_from_target(
        self,
        embed: torch.Tensor,
        norm_weight: torch.Tensor | None,
        lm_head: torch.Tensor | None,
        vocab: DraftVocab,
    ) -> None:
        """See `eagle3.draft.init.init_from_target`."""
        init.init_from_target(self, embed, norm_weight, lm_head, vocab)

    def trainable_state(self) -> dict[str, torch.Tensor]:
        """Every weight but the frozen embedding, by SGLang's names; detached, not copied."""
        return {name: value.detach() for name, value in self.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def load_trainable_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Reverse of `trainable_state`; loads nothing unless everything fits.

        Raises:
            ProblemsError: kinds `draft.state.missing`, `.unknown`, `.shape`: every tensor that does not fit.
        """
        own = self.trainable_state()
        raise_problems(_state_problems(own, state))
        for name, value in own.items():
            value.copy_(state[name])


def _state_problems(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> list[Problem]:
    fix = "load it with the draft config it was saved with"
    problems = [
        Problem(name, "draft.state.missing", "is not in the saved weights", fix) for name in own if name not in state
    ]
    for name, value in state.items():
        if name not in own:
            problems.append(Problem(name, "draft.state.unknown", "is not a trainable weight of this drafter", fix))
        elif value.shape != own[name].shape:
            message = f"is {list(value.shape)}, expected {list(own[name].shape)}"
            problems.append(Problem(name, "draft.state.shape", message, fix))
    return problems

"""Targets and drafters for the tests of real decoding: tables of random numbers, and tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.evaluate.decode.drafter import Drafter
from eagle3.evaluate.decode.growth import Drafting
from eagle3.evaluate.decode.target import CachedTarget, Seen
from eagle3.evaluate.decode.tree import Tree
from eagle3.target.families.deepseek import DEEPSEEK
from eagle3.target.families.gpt_oss import GPT_OSS
from eagle3.target.families.llama import LLAMA
from eagle3.target.families.qwen import QWEN
from eagle3.target.spec import TargetSpec

INDICES = (0, 2)
CHAIN = Drafting(4, 1, 5)
TREE = Drafting(3, 3, 10)
PLANS = {"chain": CHAIN, "tree": TREE, "wide": Drafting(2, 4, 15)}

_SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    **_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_FAMILIES: dict[str, tuple[Any, Any, TargetSpec, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, QWEN, {"head_dim": 6}),
    "qwen3_sliding": (
        Qwen3Config,
        Qwen3ForCausalLM,
        QWEN,
        {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3_moe_sliding": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        QWEN,
        {**_MOE, "head_dim": 6, "num_experts": 4, "use_sliding_window": True, "sliding_window": 5},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, DEEPSEEK, _MLA),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        GPT_OSS,
        {"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
}
FAMILIES = tuple(_FAMILIES)


def make_model(family: str = "llama", vocab: int = 12, seed: int = 0) -> tuple[PreTrainedModel, TargetSpec]:
    """A tiny random target in float64 without end-of-text tokens, whose next token is hard to tell."""
    config, model_class, spec, values = _FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config(**{**_SHAPE, "vocab_size": vocab, **values})).eval().requires_grad_(False)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.4, generator=generator)
    return model.double(), spec


def make_target(family: str = "llama", vocab: int = 12, seed: int = 0) -> CachedTarget:
    return CachedTarget(*make_model(family, vocab, seed), INDICES)


def make_drafter(target: CachedTarget, ids: Sequence[int], seed: int = 1, **overrides: Any) -> Drafter:
    """A random drafter in float64 that proposes these target ids."""
    config = target.model.config
    vocab = DraftVocab(torch.tensor(ids), config.vocab_size)
    shape = DraftConfig.from_target(
        {**_SHAPE, "vocab_size": config.vocab_size, "rope_theta": 10000.0, "max_position_embeddings": 512},
        len(target.output_indices),
        draft_vocab_size=len(ids),
        head_dim=6,
        **overrides,
    )
    model = DraftModel(shape).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(1 + 0.3 * noise if value.ndim == 1 else 0.4 * noise)
        model.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    return Drafter(model, vocab)


class Foreseeing(Drafter):
    """Drafts what the target itself would say, blurred by noise that depends on the tokens before alone.

    Attributes:
        noise: of the logits; 0 is always right where the draft vocab has the token.
    """

    def __init__(self, target: CachedTarget, first: int, ids: Sequence[int], noise: float) -> None:
        self.target, self.first, self.noise = target, first, noise
        self.known: dict[tuple[int, ...], Tensor] = {}
        super().__init__(make_drafter(target, ids).model, DraftVocab(torch.tensor(ids), target.model.config.vocab_size))

    def reset(self) -> None:
        self.tokens: list[int] = []
        self.paths: list[list[int]] = [[]]

    def extend(self, aux: Tensor, following: Sequence[int]) -> None:
        assert len(aux) == len(following)
        self.tokens += following
        self.paths = [[]]

    def feed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        first = len(self.paths)
        self.paths += [[*self.paths[parent], token] for token, parent in zip(tokens, parents, strict=True)]
        return list(range(first, len(self.paths)))

    @torch.inference_mode()
    def logits(self, nodes: Sequence[int]) -> Tensor:
        contexts = [(self.first, *self.tokens, *self.paths[node]) for node in nodes]  # all of one length
        if any(context not in self.known for context in contexts):
            found = self.target.model(torch.tensor(contexts), logits_to_keep=1).logits[:, -1, self.vocab.ids]
            for context, logits in zip(contexts, found, strict=True):
                seeded = torch.Generator().manual_seed(hash(context) % 2**31)
                noise = torch.randn(logits.shape, generator=seeded, dtype=logits.dtype)
                self.known[context] = logits + self.noise * noise
        return torch.stack([self.known[context] for context in contexts])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Table:
    """Random logits for every context, for target and drafter alike; counts nothing, forgets nothing."""

    def __init__(self, size: int, seed: int, spread: float = 1.5) -> None:
        self.size, self.seed, self.spread = size, seed, spread
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, context: Sequence[int]) -> Tensor:
        key = tuple(context)
        if key not in self.known:
            seeded = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**31)
            self.known[key] = self.spread * torch.randn(self.size, generator=seeded, dtype=torch.float64)
        return self.known[key]


class TableTarget:
    """`CachedTarget` over a table."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def prefill(self, prompt: Sequence[int]) -> Seen:
        self.tokens = list(prompt)
        return Seen(self.table.logits(self.tokens)[None], torch.zeros(len(prompt), 1))

    def verify(self, last: int, tree: Tree) -> Seen:
        self.paths = [[last]]
        for node, parent in enumerate(tree.parents, 1):
            self.paths.append([*self.paths[parent], tree.token(node)])
        rows = [self.table.logits([*self.tokens, *path]) for path in self.paths]
        return Seen(torch.stack(rows), torch.zeros(len(rows), 1))

    def keep(self, path: Sequence[int]) -> None:
        self.tokens += self.paths[path[-1]]


class TableDrafter:
    """`Drafter` over a table."""

    def __init__(self, table: Table, vocab: DraftVocab, first: int) -> None:
        self.table, self.vocab, self.first = table, vocab, first

    def reset(self) -> None:
        self.tokens = [self.first]

    def extend(self, aux: Tensor, following: Sequence[int]) -> None:
        self.tokens += following
        self.paths: list[list[int]] = [[]]

    def feed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        first = len(self.paths)
        self.paths += [[*self.paths[parent], token] for token, parent in zip(tokens, parents, strict=True)]
        return list(range(first, len(self.paths)))

    def logits(self, nodes: Sequence[int]) -> Tensor:
        return torch.stack([self.table.logits([*self.tokens, *self.paths[node]]) for node in nodes])

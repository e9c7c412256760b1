"""Tiny random targets with their tokenizers, on disk in the layouts that the real checkpoints are published in.

For tests, for `configs/tiny-kimi`, and for trying a pipeline out on a laptop: real architectures, real depth, no
knowledge. Every norm weight differs from 1 and the logits are well spread, so that a skipped norm, a wrong head or
a shifted layer shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle3.files import write_json_atomic

_CORPUS = """
The small model reads a question and writes an answer. A draft model guesses the next few tokens, and the target
model checks all of them in one pass; what agrees is kept, and the first word that does not agree is replaced.
How many planets are there? There are eight planets, and the largest of them is Jupiter. Write a short poem about
the sea: the water is grey, the wind is cold, and the boats come home before the night. Add two and three: the sum
is five. List three colours: red, green, blue. def add(first, second): return first + second. Thank you very much!
What is the capital of France? The capital of France is Paris. I am sorry, but I do not know the answer to that.
Explain why bread rises: yeast turns sugar into gas, and the dough holds it. Translate "good morning" into German.
"""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Kimi-K2.5's turns: a finished assistant turn carries its thinking (often none), the prompt opens it.
KIMI_TEMPLATE = (
    "{% for message in messages %}"
    "{% set mark = message['role'] if message['role'] in ('user', 'assistant') else 'system' %}"
    "{{ '<|im_' + mark + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<think>' + (message.get('reasoning_content') or '') + '</think>' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_assistant|>assistant<|im_middle|><think>' }}"
    "{% if thinking is defined and not thinking %}{{ '</think>' }}{% endif %}"
    "{% endif %}"
)

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KIMI_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    "[UNK]",
    "[PAD]",
)


def make_tokenizer(
    special_tokens: Sequence[str], vocab_size: int, chat_template: str, **roles: str
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` ids, the special tokens last; `roles` e.g. `eos_token="[EOS]"`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    # The thinking marks are ordinary added tokens in Kimi's tokenizer: they survive `skip_special_tokens`.
    added = [AddedToken(token, special="think" not in token, normalized=False) for token in special_tokens]
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == vocab_size, "the corpus is too short for this vocabulary"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **roles)


def make_tiny_llama(folder: Path | str, *, num_hidden_layers: int = 8, seed: int = 0, **config: Any) -> Path:
    """Writes a tiny Llama (ChatML, PAD = EOS as in SmolLM2) and returns its folder; `config` overrides LlamaConfig."""
    return _make_chatml(folder, LlamaConfig, LlamaForCausalLM, seed, num_hidden_layers=num_hidden_layers, **config)


def make_tiny_qwen3(folder: Path | str, *, num_hidden_layers: int = 8, seed: int = 0, **config: Any) -> Path:
    """Writes a tiny Qwen3 with tied embeddings and returns its folder; `config` overrides Qwen3Config."""
    shape = {"num_hidden_layers": num_hidden_layers, "head_dim": 16, "tie_word_embeddings": True, **config}
    return _make_chatml(folder, Qwen3Config, Qwen3ForCausalLM, seed, **shape)


def make_tiny_deepseek_v3(folder: Path | str, *, num_hidden_layers: int = 6, seed: int = 0, **config: Any) -> Path:
    """Writes a tiny DeepSeek-V3 and returns its folder; `config` overrides DeepseekV3Config."""
    shape = {**_KIMI_TEXT, "num_hidden_layers": num_hidden_layers, **config}
    return _make_chatml(folder, DeepseekV3Config, DeepseekV3ForCausalLM, seed, **shape)


def make_tiny_kimi(folder: Path | str, *, num_hidden_layers: int = 61, seed: int = 0, **text_config: Any) -> Path:
    """Writes a tiny Kimi-K2.5, vision tower included, as published: nested `text_config` (model type `kimi_k2`,
    old rope layout) and `language_model.model.layers.N...` names. 4.1M parameters at the real depth of 61.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer(
        KIMI_TOKENS, _VOCAB_SIZE, KIMI_TEMPLATE, bos_token="[BOS]", eos_token="[EOS]", pad_token="[PAD]"
    )
    vocab = tokenizer.get_vocab()
    end_of_turn, media_pad = vocab["<|im_end|>"], vocab["<|media_pad|>"]
    text = {
        **_KIMI_TEXT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": num_hidden_layers,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_of_turn,
        "pad_token_id": tokenizer.pad_token_id,
        **text_config,
    }
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": media_pad,
        "pad_token_id": tokenizer.pad_token_id,
        "projection_hidden_size": _KIMI_VISION["hidden_size"],
        "text_config": text,
        "vision_config": _KIMI_VISION | _PUBLISHED_KIMI_VISION | {"text_hidden_size": text["hidden_size"]},
    }
    # A copy: the constructor rewrites the nested model type.
    config = Kimi_K25Config(
        text_config=dict(text),
        vision_config=_KIMI_VISION,
        projection_hidden_size=_KIMI_VISION["hidden_size"],
        image_token_id=media_pad,
        tie_word_embeddings=False,
    )
    model = Kimi_K25ForConditionalGeneration(config)
    _randomise(model, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight[media_pad] = 0  # never its greedy token: an answer is text
    _save(model, folder, tokenizer, end_of_turn, rename=_published_kimi_name)
    write_json_atomic(folder / "config.json", published)
    return folder


_VOCAB_SIZE = 512

_KIMI_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "vocab_size": _VOCAB_SIZE,
}
_KIMI_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


# The same and more under the names that the published config has and serving engines read.
_PUBLISHED_KIMI_VISION: dict[str, Any] = {
    "vt_hidden_size": 32,
    "vt_intermediate_size": 32,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 32,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}


def _make_chatml(
    folder: Path | str,
    config_class: Callable[..., Any],
    model_class: Callable[..., PreTrainedModel],
    seed: int,
    **overrides: Any,
) -> Path:
    tokenizer = make_tokenizer(
        CHATML_TOKENS, _VOCAB_SIZE, CHATML_TEMPLATE, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    shape = {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **overrides,
    }
    model = model_class(config_class(**shape))
    _randomise(model, seed)
    _save(model, Path(folder), tokenizer, tokenizer.eos_token_id)
    return Path(folder)


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Norm weights in [0.5, 1.5], spread-out logits, expert biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                wide = "lm_head" in name or (tied and "embed_tokens" in name)
                parameter.normal_(0.0, 0.4 if wide else 0.15, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1, generator=generator)


def _save(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    eos_token_id: int,
    rename: Callable[[str], str] | None = None,
) -> None:
    model.generation_config.eos_token_id = eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if rename is None:
        return
    weights = folder / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def _published_kimi_name(name: str) -> str:
    """Transformers 5.24 saves `language_model.model.blocks.N`, `model.mm_projector.pre_norm` and
    `vision_tower.encoder.patch_embed`."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model.")
    return name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")

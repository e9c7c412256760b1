"""A target and a drafter that are built, not trained, so that acceptance tells which boundaries the drafter was fed.

The target's answers run in circles of `CIRCLE` tokens, one circle for each slot of the drafter. Its residual stream
holds, in channels of their own, the token itself (one-hot), a constant 1, and at *one* boundary only the next token
(one-hot): for the tokens of circle s that is the boundary that slot s is meant to read. The layer before adds it, the
layer after takes it away, both with their MLP; attention runs but adds nothing.

The drafter reads of slot s only the next tokens of circle s, moves them one on and drafts that. Where it does not find
them, it drafts a token that never comes. So an answer in circle s has acceptance length steps + 1 if slot s is fed the
right boundary, and 1 if it is fed any other. Its embedding and attention play no part.

Everything holds in bfloat16 too: what rounding leaves behind at a wrong boundary is smaller than the constant.

Shapes: H hidden, I MLP width, S slots, C tokens in all circles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.serve.export import export_run
from eagle3.wiring import LayerWiring, WiringContract
from eagle3.wiring.conventions import LAYER_IDS
from eagle3.wiring.targets import read_target_config, target_facts, text_config
from tests.unit.serve.cases import Run, serve, write_run

CIRCLE = 16
FIRST_TOKEN = 7  # so that d2t is not zero
SHARPNESS = 4.0  # of the MLP's gates: silu(SHARPNESS * x) is 0 at x = 0 and SHARPNESS * x where a token is
CONSTANT = 0.25  # of the constant in the drafter's state
NOTHING = 0.3  # logit of the token that never comes, in units of a found token's


@dataclass(frozen=True)
class Layout:
    """Where things are in the residual stream.

    Attributes:
        hidden_size: H, at least 2 * C + 1.
        slots: S.
    """

    hidden_size: int
    slots: int

    def __post_init__(self) -> None:
        assert self.hidden_size > 2 * self.tokens

    @property
    def tokens(self) -> int:
        return self.slots * CIRCLE

    @property
    def next_token(self) -> range:
        """Channels of the next token; the token itself has 0 .. C - 1."""
        return range(self.tokens, 2 * self.tokens)

    @property
    def constant(self) -> int:
        return 2 * self.tokens

    def following(self, number: int) -> int:
        """The token after token `number`, both counted from 0."""
        circle, place = divmod(number, CIRCLE)
        return circle * CIRCLE + (place + 5) % CIRCLE


def make_target(folder: Path, maker: Callable[..., Path], wiring: LayerWiring, **config: Any) -> Path:
    """Writes a constructed target.

    Args:
        folder: where it goes.
        maker: `make_tiny_llama`, `make_tiny_deepseek_v3` or `make_tiny_kimi` of `eagle3.target.tiny`, whose weights
            are replaced.
        wiring: the layers that the drafter is meant to read; their boundaries must lie at least two apart.
        config: overrides for the maker.
    """
    maker(folder, num_hidden_layers=wiring.num_hidden_layers, **config)
    hidden_size = text_config(read_target_config(folder))["hidden_size"]
    layout = Layout(hidden_size, wiring.num_aux)
    assert all(after - before > 1 for before, after in zip(wiring.boundaries, wiring.boundaries[1:], strict=False))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()
    embedding, head = _named(tensors, "embed_tokens.weight"), _named(tensors, "lm_head.weight")
    embedding[:, layout.constant] = 1
    for number in range(layout.tokens):
        embedding[FIRST_TOKEN + number, number] = 1
        head[FIRST_TOKEN + layout.following(number), number] = SHARPNESS
    for slot, boundary in enumerate(wiring.boundaries):
        _shift(tensors, layout, slot, layer=boundary - 1, sign=1)
        _shift(tensors, layout, slot, layer=boundary, sign=-1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shift(tensors: dict[str, Tensor], layout: Layout, slot: int, layer: int, sign: int) -> None:
    """Makes a layer's MLP add (or take away) the next token for every token of one circle."""
    mlp = "mlp.shared_experts" if any(f"layers.{layer}.mlp.shared_experts." in name for name in tensors) else "mlp"
    gate, up, down = (_named(tensors, f"layers.{layer}.{mlp}.{part}_proj.weight") for part in ("gate", "up", "down"))
    ones = 2 if sign > 0 else 3  # what the norm before sees: the token, the constant, and the next token if it is there
    for number in range(slot * CIRCLE, (slot + 1) * CIRCLE):
        gate[number], up[number] = 0, 0
        gate[number, number], up[number, number] = SHARPNESS, 1
        reached = SHARPNESS * layout.hidden_size / ones
        down[layout.next_token[layout.following(number)], number] = sign / reached


def make_export(folder: Path, target: Path, wiring: LayerWiring, engine_version: str, dtype: str = "float32") -> Path:
    """A constructed drafter for a constructed target, exported for one SGLang version with `eagle3 export`."""
    facts, target_config = target_facts(target), text_config(read_target_config(target))
    layout = Layout(facts.hidden_size, wiring.num_aux)
    circles = range(FIRST_TOKEN, FIRST_TOKEN + layout.tokens)
    vocab = DraftVocab(torch.tensor([*circles, facts.vocab_size - 1]), facts.vocab_size)
    config = DraftConfig.from_target(
        target_config,
        wiring.num_aux,
        draft_vocab_size=len(vocab),
        intermediate_size=max(layout.tokens, target_config["intermediate_size"]),
        head_dim=target_config.get("head_dim") or facts.hidden_size // target_config["num_attention_heads"],
        rope=RopeConfig(),
    )
    contract = WiringContract(
        target_name=facts.name,
        target_family=facts.family,
        target_config_digest=str(facts.config_digest),
        num_hidden_layers=facts.num_hidden_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        output_indices=wiring.output_indices,
        last_hidden_states="post_norm",
        dtype=dtype,
        tokenizer_digest="sha256:" + "1" * 64,
        chat_template_digest="sha256:" + "2" * 64,
        draft_vocab_digest=vocab.digest,
    )
    folder.mkdir(parents=True)
    state = drafter_state(config, layout)
    run = Run(folder / "run", folder / "no-dataset", config, vocab, contract, state, torch.empty(0))
    write_run(run, target_config)
    return export_run(serve(run, folder / "checkpoint", engine_version=engine_version, dtype=dtype)).output


def drafter_state(config: DraftConfig, layout: Layout) -> dict[str, Tensor]:
    """The drafter's weights, by their names in a checkpoint."""
    state = {name: torch.zeros(value.shape) for name, value in DraftModel(config).trainable_state().items()}
    for name, value in state.items():
        if name.endswith("norm.weight"):
            value.fill_(1)
    reached = SHARPNESS * config.hidden_size / (1 + CONSTANT**2)
    for number in range(layout.tokens):
        channel, following = layout.next_token[number], layout.next_token[layout.following(number)]
        state["fc.weight"][channel, number // CIRCLE * config.hidden_size + channel] = 1
        state["midlayer.mlp.gate_proj.weight"][number, channel] = SHARPNESS
        state["midlayer.mlp.up_proj.weight"][number, channel] = 1
        state["midlayer.mlp.down_proj.weight"][following, number] = 1 / reached
        state["midlayer.mlp.down_proj.weight"][channel, number] -= 1 / reached
        state["lm_head.weight"][number, channel] = 1
    state["fc.weight"][layout.constant, layout.constant] = CONSTANT
    state["lm_head.weight"][layout.tokens, layout.constant] = NOTHING / CONSTANT
    return state


def prompts(slots: int, length: int = 6) -> list[list[int]]:
    """One prompt for each slot, walking in its circle."""
    walks = []
    for slot in range(slots):
        numbers = [slot * CIRCLE]
        while len(numbers) < length:
            numbers.append(Layout(2 * slots * CIRCLE + 1, slots).following(numbers[-1]))
        walks.append([FIRST_TOKEN + number for number in numbers])
    return walks


def with_ids(export: Path, folder: Path, ids: Sequence[int] | None) -> Path:
    """A copy of an export whose nested layer ids are others; None leaves `eagle_config` out."""
    shutil.copytree(export, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if ids is None:
        del config["eagle_config"]
    else:
        config["eagle_config"][LAYER_IDS] = list(ids)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def acceptance_length(meta_infos: Sequence[dict[str, Any]]) -> float:
    """Acceptance length from SGLang's `meta_info`, pooled: the first token of an answer comes from the prefill."""
    rounds = sum(meta["spec_verify_ct"] for meta in meta_infos)
    committed: int = sum(meta["completion_tokens"] - 1 for meta in meta_infos)
    return committed / rounds


def _named(tensors: dict[str, Tensor], ending: str) -> Tensor:
    """The one tensor whose name ends so (a vision tower has names of its own)."""
    (found,) = [tensor for name, tensor in tensors.items() if name.endswith(ending) and "vision" not in name]
    return found

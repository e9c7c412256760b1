"""Tiny runs and stores, written as the trainer and the extraction write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.config import ServeConfig, TrainConfig, dump_config
from eagle3.data.store import StoredSample, StoreWriter
from eagle3.data.store_layout import StoreLayout
from eagle3.data.target_argmax import make_target_head, with_argmax
from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError
from eagle3.files import write_json_atomic
from eagle3.train.checkpoint import TrainState, save_checkpoint
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import load_fingerprint
from eagle3.wiring.targets import config_digest

VOCAB, HIDDEN = 32, 16
DRAFT_IDS = (2, 5, 7, 9, 20, 21, 30, 31)
KIMI = {"model_type": "kimi_k2", "num_hidden_layers": 61}
LLAMA = {"model_type": "llama", "num_hidden_layers": 12}


@dataclass(frozen=True)
class Run:
    """A run folder and what is in it."""

    folder: Path
    dataset: Path
    config: DraftConfig
    vocab: DraftVocab
    contract: WiringContract
    state: dict[str, torch.Tensor]
    embedding: torch.Tensor


def make_target_config(**values: Any) -> dict[str, Any]:
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    }
    return {**shape, **LLAMA, **values}


def make_contract(target_config: Mapping[str, Any], outputs: Sequence[int], family: str = "llama") -> WiringContract:
    return WiringContract(
        target_name="tiny",
        target_family=family,
        target_config_digest=config_digest(target_config),
        num_hidden_layers=target_config["num_hidden_layers"],
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        output_indices=tuple(outputs),
        last_hidden_states="post_norm",
        dtype="float32",
        tokenizer_digest="sha256:" + "1" * 64,
        chat_template_digest="sha256:" + "2" * 64,
    )


def make_samples(masks: Sequence[Sequence[int]], num_aux: int = 3, seed: int = 0) -> list[StoredSample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        StoredSample(
            id=f"sample-{number}",
            input_ids=torch.randint(0, VOCAB, (len(mask),), generator=generator),
            loss_mask=torch.tensor(mask, dtype=torch.bool),
            aux_hidden_states=torch.randn(len(mask), num_aux * HIDDEN, generator=generator),
            last_hidden_states=torch.randn(len(mask), HIDDEN, generator=generator),
        )
        for number, mask in enumerate(masks)
    ]


def make_store(
    folder: Path,
    contract: WiringContract,
    target_config: Mapping[str, Any],
    samples: Sequence[StoredSample],
    tied: bool = False,
) -> Path:
    generator = torch.Generator().manual_seed(7)
    head = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "norm.weight": torch.ones(HIDDEN),
    }
    if not tied:
        head["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    layout = StoreLayout(contract)
    target = make_target_head(head, target_config, "post_norm")
    with StoreWriter(folder, contract, {"keep_ids": []}, target_config, head) as writer:
        writer.write_shard([with_argmax(sample, layout, target) for sample in samples])
    return folder


def make_run(
    folder: Path,
    target_config: Mapping[str, Any] | None = None,
    outputs: Sequence[int] = (1, 5, 8),
    family: str = "llama",
    draft_ids: Sequence[int] = DRAFT_IDS,
    tied: bool = False,
    masks: Sequence[Sequence[int]] = ((0, 0, 1, 1, 1, 1),),
    max_length: int = 2048,
    spread: float = 0.4,
    **draft: Any,
) -> Run:
    """A store at `folder/store` and a run at `folder/run` with one random checkpoint, its norms random too."""
    target_config = make_target_config() if target_config is None else dict(target_config)
    contract = make_contract(target_config, outputs, family)
    store = make_store(folder / "store", contract, target_config, make_samples(masks, len(outputs)), tied)
    embedding = load_file(store / "target_head.safetensors")["embed_tokens.weight"]
    vocab = DraftVocab(torch.tensor(draft_ids), VOCAB)
    config = DraftConfig.from_target(target_config, len(outputs), draft_vocab_size=len(vocab), head_dim=6, **draft)
    contract = contract.with_draft_vocab(vocab.digest)
    run = Run(folder / "run", store, config, vocab, contract, make_state(config, spread=spread), embedding)
    write_run(run, target_config, max_length)
    load_fingerprint(store)[0].save(run.folder)
    return run


def write_run(run: Run, target_config: Mapping[str, Any], max_length: int = 2048) -> None:
    """The run's folder, as the trainer leaves it."""
    run.folder.mkdir()
    run.contract.save(run.folder)
    write_json_atomic(run.folder / "draft_config.json", run.config.to_dict())
    save_file({"d2t": run.vocab.d2t, "t2d": run.vocab.t2d}, run.folder / "draft_vocab.safetensors")
    write_json_atomic(run.folder / "target_config.json", dict(target_config))
    outputs = list(run.contract.output_indices)
    settings = TrainConfig(
        dataset=str(run.dataset), output=str(run.folder), output_indices=outputs, max_length=max_length
    )
    (run.folder / "config.yaml").write_text(dump_config(settings))
    save_checkpoint(run.folder, run.state, {"exp_avg": torch.zeros(1)}, TrainState(20, 0, 1, "sha256:" + "3" * 64))
    best = {"checkpoint": "step-00000020", "acceptance_length": 1.1, "loss": 2.0}
    write_json_atomic(run.folder / "best.json", best)


def make_state(config: DraftConfig, seed: int = 0, spread: float = 0.4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator) * spread + (value.ndim == 1)
        for name, value in DraftModel(config).trainable_state().items()
    }


def make_kimi_run(folder: Path, **values: Any) -> Run:
    """Outputs 2, 30, 58 of a target with Kimi-K2.5's depth."""
    rope = RopeConfig(rope_theta=50000.0)
    return make_run(folder, make_target_config(**KIMI), (2, 30, 58), "kimi_k25", rope=rope, **values)


def serve(run: Run, output: Path, **values: Any) -> ServeConfig:
    return ServeConfig(run=str(run.folder), output=str(output), **values)


def kinds(error: ProblemsError) -> list[str]:
    return [problem.kind for problem in error.problems]


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of a safetensors file."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def with_contract(run: Run, **values: Any) -> None:
    """Changes fields of the run's contract on disk."""
    replace(run.contract, **values).save(run.folder)

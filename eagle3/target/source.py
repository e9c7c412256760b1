"""What an extraction runs through the target: conversations, or the samples of another store once more.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.config import ConversationsConfig, ExtractConfig
from eagle3.data.chat import PrepareReport, TokenSample, load_tokenizer, prepare_samples, tokenizer_digest
from eagle3.data.conversations import load_conversations
from eagle3.data.open_reader import open_reader
from eagle3.errors import Problem, raise_problems
from eagle3.files import is_url
from eagle3.target.identity import conversations_digest
from eagle3.target.resolve import find_target


@dataclass(frozen=True)
class Source:
    """Samples, and what the new store's settings say of where they came from."""

    samples: list[TokenSample]
    prepared: PrepareReport
    settings: dict[str, Any]
    skip_bad: bool


def read_source(cfg: ExtractConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    """The samples of `cfg.from_store` if it is given, else those of `cfg.data`.

    Raises:
        ProblemsError: they cannot be used, or are another tokenizer's.
    """
    if cfg.from_store is not None:
        return _from_store(cfg, tokenizer)
    assert cfg.data is not None
    return _from_conversations(cfg.data, tokenizer)


def check_data(cfg: ExtractConfig) -> PrepareReport:
    """What would become of `cfg`'s samples; reads the target's tokenizer and no weights.

    Raises:
        ProblemsError: as `read_source`.
    """
    files = find_target(cfg.target, weights=False)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    return read_source(cfg, tokenizer).prepared


def _from_conversations(data: ConversationsConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    conversations, bad_records = load_conversations(data)
    samples, prepared = prepare_samples(
        tokenizer,
        conversations,
        data.max_length,
        data.skip_bad,
        data.chat_template_kwargs,
        data.split_turns,
        data.workers,
        None if data.cache is None else Path(data.cache),
    )
    prepared.total += bad_records.total()
    prepared.drops.update(bad_records)
    settings = {
        "conversations": conversations_digest(conversations),
        "max_length": data.max_length,
        "chat_template_kwargs": data.chat_template_kwargs,
        **({} if data.split_turns == "auto" else {"split_turns": data.split_turns}),
    }
    return Source(samples, prepared, settings, data.skip_bad)


def _from_store(cfg: ExtractConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    assert cfg.from_store is not None
    if not is_url(cfg.from_store) and Path(cfg.from_store).resolve() == Path(cfg.output).resolve():
        message = "is the store to extract from and the output: a store is never changed in place"
        raise_problems([Problem(cfg.output, "extract.same_store", message, "give another output")])
    reader = open_reader(cfg.from_store, cfg.cache)
    if reader.contract.tokenizer_digest != tokenizer_digest(tokenizer):
        message = "its token ids are those of another tokenizer than the target's"
        fix = "extract from the conversations, or give the target that the store was made for"
        raise_problems([Problem(cfg.from_store, "extract.other_tokenizer", message, fix)])
    samples, digest = [], hashlib.sha256()
    with reader.ahead([[index] for index in range(len(reader))], tokens_only=True) as done:
        for index, info in enumerate(reader.samples):
            input_ids, loss_mask = reader.read_tokens(index)
            samples.append(TokenSample(info.id, input_ids.tolist(), loss_mask.tolist(), info.source))
            digest.update(f"{info.id}\0{info.tokens}\0".encode())
            digest.update(input_ids.contiguous().numpy().tobytes() + loss_mask.to(torch.uint8).numpy().tobytes())
            done(1)
    tokens = sum(info.tokens for info in reader.samples)
    prepared = PrepareReport(
        total=len(samples),
        kept=len(samples),
        samples=len(samples),
        tokens=tokens,
        supervised_tokens=sum(info.supervised for info in reader.samples),
    )
    return Source(samples, prepared, {"samples": f"sha256:{digest.hexdigest()}"}, skip_bad=False)

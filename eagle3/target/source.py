"""What an extraction runs through the target: conversations, or the samples of another store once more.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.config import ConversationsConfig, ExtractConfig
from eagle3.data.chat import PrepareReport, TokenSample, load_tokenizer, prepare_stream, tokenizer_digest
from eagle3.data.chat.sample_file import SampleFile
from eagle3.data.conversations import ConversationStream
from eagle3.data.open_reader import open_reader
from eagle3.errors import Problem, raise_problems
from eagle3.files import is_url
from eagle3.target.identity import ConversationsDigest
from eagle3.target.resolve import find_target

Keep = Callable[[TokenSample], None]
"""Takes a sample, in order."""


@dataclass(frozen=True)
class Prepared:
    """What became of the data, and what the new store's settings say of where it came from."""

    prepared: PrepareReport
    settings: dict[str, Any]
    skip_bad: bool


@dataclass(frozen=True)
class Source(Prepared):
    """The same with the samples, which lie on the disk."""

    samples: Sequence[TokenSample]


class GoneBy:
    """How much of a source went by.

    Attributes:
        share: asks, 0 to 1; None where it is not known.
    """

    def __init__(self) -> None:
        self.share: Callable[[], float | None] = lambda: None


def read_source(cfg: ExtractConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    """The samples of `cfg.from_store` if it is given, else those of `cfg.data`.

    They lie in a scratch file without a name, on the disk of `cfg.data.cache` or else of `cfg.output`.

    Raises:
        ProblemsError: as `stream_source`; the disk is full, or will not hold them (kind `chat.scratch`).
    """
    cache = None if cfg.data is None else cfg.data.cache
    gone_by = GoneBy()
    samples = SampleFile(Path(cache or cfg.output), lambda: gone_by.share())
    found = stream_source(cfg, tokenizer, samples.add, gone_by)
    return Source(found.prepared, found.settings, found.skip_bad, samples)


def stream_source(
    cfg: ExtractConfig, tokenizer: PreTrainedTokenizerBase, keep: Keep, gone_by: GoneBy | None = None
) -> Prepared:
    """Hands the samples of `cfg` to `keep`, one after the other.

    Args:
        gone_by: knows at each sample how far it is.

    Raises:
        ProblemsError: they cannot be used, or are another tokenizer's.
    """
    gone_by = gone_by or GoneBy()
    if cfg.from_store is not None:
        return _from_store(cfg, tokenizer, keep, gone_by)
    assert cfg.data is not None
    return _from_conversations(cfg.data, tokenizer, keep, gone_by)


def check_data(cfg: ExtractConfig) -> PrepareReport:
    """What would become of `cfg`'s samples; reads the target's tokenizer and no weights, and keeps no sample.

    Raises:
        ProblemsError: as `stream_source`.
    """
    files = find_target(cfg.target, weights=False)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    return stream_source(cfg, tokenizer, lambda sample: None).prepared


def _from_conversations(
    data: ConversationsConfig, tokenizer: PreTrainedTokenizerBase, keep: Keep, gone_by: GoneBy
) -> Prepared:
    conversations, digest = ConversationStream(data), ConversationsDigest()
    gone_by.share = conversations.share
    prepared = prepare_stream(
        tokenizer,
        digest.passing(conversations),
        keep,
        data.max_length,
        data.skip_bad,
        data.chat_template_kwargs,
        data.split_turns,
        data.workers,
        None if data.cache is None else Path(data.cache),
    )
    prepared.total += conversations.dropped.total()
    prepared.drops.update(conversations.dropped)
    settings = {
        "conversations": digest.value(),
        "max_length": data.max_length,
        "chat_template_kwargs": data.chat_template_kwargs,
        **({} if data.split_turns == "auto" else {"split_turns": data.split_turns}),
    }
    return Prepared(prepared, settings, data.skip_bad)


def _from_store(cfg: ExtractConfig, tokenizer: PreTrainedTokenizerBase, keep: Keep, gone_by: GoneBy) -> Prepared:
    assert cfg.from_store is not None
    if not is_url(cfg.from_store) and Path(cfg.from_store).resolve() == Path(cfg.output).resolve():
        message = "is the store to extract from and the output: a store is never changed in place"
        raise_problems([Problem(cfg.output, "extract.same_store", message, "give another output")])
    reader = open_reader(cfg.from_store, cfg.cache)
    if reader.contract.tokenizer_digest != tokenizer_digest(tokenizer):
        message = "its token ids are those of another tokenizer than the target's"
        fix = "extract from the conversations, or give the target that the store was made for"
        raise_problems([Problem(cfg.from_store, "extract.other_tokenizer", message, fix)])
    digest, read, tokens = hashlib.sha256(), 0, sum(info.tokens for info in reader.samples)
    gone_by.share = lambda: read / tokens
    with reader.ahead([[index] for index in range(len(reader))], tokens_only=True) as done:
        for index, info in enumerate(reader.samples):
            input_ids, loss_mask = reader.read_tokens(index)
            read += info.tokens
            keep(TokenSample(info.id, input_ids.tolist(), loss_mask.tolist(), info.source))
            digest.update(f"{info.id}\0{info.tokens}\0".encode())
            digest.update(input_ids.contiguous().numpy().tobytes() + loss_mask.to(torch.uint8).numpy().tobytes())
            done(1)
    prepared = PrepareReport(
        total=len(reader),
        kept=len(reader),
        samples=len(reader),
        tokens=tokens,
        supervised_tokens=sum(info.supervised for info in reader.samples),
    )
    return Prepared(prepared, {"samples": f"sha256:{digest.hexdigest()}"}, skip_bad=False)

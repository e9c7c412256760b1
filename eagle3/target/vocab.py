"""`eagle3 vocab`: what draft vocabs would hold, of conversations before they are extracted, or of a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eagle3.config import CacheSection, ExtractConfig
from eagle3.data.chat import TokenSample, load_tokenizer, special_token_ids, tokenizer_digest
from eagle3.data.open_reader import open_reader
from eagle3.data.vocab_count import SupervisedCounts, count_samples, count_store
from eagle3.data.vocab_coverage import CoverageReport, coverage_report, held
from eagle3.data.vocab_file import VocabFile
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.target.resolve import find_target
from eagle3.target.source import read_source, stream_source
from eagle3.wiring.layers import is_int


@dataclass(frozen=True)
class Counted:
    """Counts of supervised tokens, and what a vocab made of them must hold.

    Attributes:
        forced: special, tool and think tokens: all that the tokenizer adds to its vocabulary.
    """

    counts: SupervisedCounts
    forced: list[int]
    tokenizer_digest: str

    def report(self) -> CoverageReport:
        """Coverage by size and source."""
        return coverage_report(self.counts, self.forced)

    def choose(self, size: int, add: Iterable[int] = (), remove: Iterable[int] = ()) -> VocabFile:
        """The vocab of `size` tokens: forced ones, those of `add`, then the most frequent, none of `remove`.

        Raises:
            ProblemsError: kinds `draft_vocab.size`, `draft_vocab.keep_ids`, `vocab.ids`.
        """
        added, removed = set(add), set(remove)
        vocab_size = self.counts.total.numel()
        message, fix = "", "correct the list of ids"
        if wrong := {item for item in added | removed if not 0 <= item < vocab_size}:
            message = f"ids outside 0 to {vocab_size - 1}: {', '.join(map(str, sorted(wrong)[:20]))}"
        elif both := added & removed:
            message = f"ids are to be added and removed: {', '.join(map(str, sorted(both)[:20]))}"
        elif vocab_size - len(removed) < size:
            message, fix = f"{vocab_size - len(removed)} tokens are left, {size} are asked for", "ask for fewer"
        raise_problems([Problem("vocab", "vocab.ids", message, fix)] if message else [])
        forced = sorted((set(self.forced) | added) - removed)
        counts = self.counts.total.clone()
        counts[torch.tensor(sorted(removed), dtype=torch.int64)] = -1
        vocab = DraftVocab.from_counts(counts, size, forced)
        seen = {"samples": self.counts.samples, "of": self.counts.of, "tokens": int(self.counts.total.sum())}
        counted = {**seen, "share": held(self.counts.total, vocab)}
        return VocabFile(vocab, self.tokenizer_digest, forced, counted)


def count_conversations(cfg: ExtractConfig, share: int | None = None, seed: int = 0) -> Counted:
    """Counts of the conversations that an extraction would take; no weights are read.

    Args:
        share: count so many samples, drawn at random by `seed`, in place of all.

    Raises:
        ProblemsError: the target or the conversations cannot be used.
    """
    files = find_target(cfg.target, weights=False)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    vocab_size = files.facts.vocab_size
    if share is None:
        counts, last = SupervisedCounts.empty(vocab_size), _Last()

        def count(sample: TokenSample) -> None:
            last.see(sample)
            if last.token < vocab_size:
                counts.add_sample(sample)

        counts.of = stream_source(cfg, tokenizer, count).prepared.samples
        _check_last(cfg, last, vocab_size)
    else:
        samples, last = read_source(cfg, tokenizer).samples, _Last()
        for sample in samples:
            last.see(sample)
        _check_last(cfg, last, vocab_size)
        counts = count_samples(samples, vocab_size, share, seed)
    forced = [token for token in special_token_ids(tokenizer) if token < vocab_size]
    return Counted(counts, forced, tokenizer_digest(tokenizer))


class _Last:
    """The highest token id of samples that go by."""

    def __init__(self) -> None:
        self.token = -1

    def see(self, sample: TokenSample) -> None:
        self.token = max(self.token, *sample.input_ids)


def _check_last(cfg: ExtractConfig, last: _Last, vocab_size: int) -> None:
    if last.token >= vocab_size:
        message = f"its tokenizer gives token {last.token}, its vocabulary ends at {vocab_size - 1}"
        raise problem_error(cfg.target.path, "extract.vocabulary", message, "use the target's own tokenizer")


def count_dataset(store: str, share: int | None = None, seed: int = 0, cache: CacheSection | None = None) -> Counted:
    """Counts of a store, in a folder or at a URL.

    Args:
        share: count so many samples, drawn at random by `seed`, in place of all.

    Raises:
        ProblemsError: it cannot be read; kind `store.keep_ids`.
    """
    reader = open_reader(store, cache, allow_incomplete=True)
    forced = reader.settings.get("keep_ids")
    if not isinstance(forced, list) or not all(
        is_int(item) and 0 <= item < reader.contract.vocab_size for item in forced
    ):
        message = f"settings.keep_ids is {str(forced)[:60]}, expected the special tokens' ids"
        fix = "restore the manifest, or extract again into an empty folder"
        raise problem_error(store, "store.keep_ids", message, fix)
    return Counted(count_store(reader, share, seed), forced, reader.contract.tokenizer_digest)

"""The samples to show: of conversations as they would be trained on, or of a hidden-state store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eagle3.config import CacheSection, ConversationsConfig, load_config
from eagle3.data.chat import load_tokenizer, prepare_samples
from eagle3.data.conversations import ConversationStream
from eagle3.data.open_reader import open_reader
from eagle3.data.show.pieces import ShownSample, shown_sample
from eagle3.data.store_format import MANIFEST_FILE
from eagle3.data.store_inspect import store_tokenizer
from eagle3.errors import problem_error
from eagle3.files import is_url


@dataclass(frozen=True)
class Found:
    """Samples, and a line or more on what they are of."""

    samples: list[ShownSample]
    about: str


def find_samples(
    place: str,
    overrides: Sequence[str] = (),
    *,
    target: str | None = None,
    limit: int = 3,
    sample_id: str | None = None,
    trust_remote_code: bool = False,
    cache: CacheSection | None = None,
) -> Found:
    """The first `limit` samples of a conversation file, a data set or a store; or those of `sample_id` alone.

    Args:
        place: file, folder or URL; a folder with a manifest is a store, as is a URL of no file.
        overrides: `key=value` for `ConversationsConfig`.
        target: folder or hub id of the target, for its tokenizer; of a store by default the recorded one.
        sample_id: of a sample, or of a conversation that is split into several.

    Raises:
        ProblemsError: what is there cannot be read or rendered; kinds `show.no_target`, `show.no_sample`,
            `show.overrides`.
    """
    if _is_store(place, overrides):
        if overrides:
            fix = "leave them out: a store's samples are rendered already"
            raise problem_error(place, "show.overrides", f"is a store, which {', '.join(overrides)} cannot change", fix)
        return _of_store(place, target, limit, sample_id, trust_remote_code, cache)
    cfg = load_config(ConversationsConfig, None, [*overrides, f"path={json.dumps(place)}"])
    if target is None:
        fix = "pass --target with its folder or hub id"
        raise problem_error(place, "show.no_target", "conversations are rendered with a target's tokenizer", fix)
    if sample_id is None:
        cfg = cfg.model_copy(update={"limit": min(limit, cfg.limit or limit)})
    else:  # what is wrong with others does not matter
        cfg = cfg.model_copy(update={"skip_bad": True})
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    stream = ConversationStream(cfg)
    wanted = None if sample_id is None else (sample_id, sample_id.rpartition("#")[0])
    conversations = [item for item in stream if wanted is None or item.id in wanted]
    dropped = stream.dropped
    if sample_id is not None and not conversations:
        raise _no_sample(place, sample_id, f"{dropped.total():,} records are bad and were left out")
    samples, report = prepare_samples(
        tokenizer,
        conversations,
        cfg.max_length,
        cfg.skip_bad and sample_id is None,
        cfg.chat_template_kwargs,
        cfg.split_turns,
        workers=1,
    )
    report.total += dropped.total()
    report.drops.update(dropped)
    if sample_id is not None:
        samples = [item for item in samples if item.id == sample_id] or [
            item for item in samples if item.id.rpartition("#")[0] == sample_id
        ]
    if not samples:
        assert sample_id is not None
        raise _no_sample(place, sample_id, f"that conversation gives {', '.join(item.id for item in conversations)}")
    kept = samples[: None if sample_id else limit]
    shown = [shown_sample(tokenizer, item.id, item.input_ids, item.loss_mask, item.source) for item in kept]
    return Found(shown, f"{place}: {report}")


def _is_store(place: str, overrides: Sequence[str]) -> bool:
    if is_url(place):
        return not Path(place).suffix and not any(item.startswith("split=") for item in overrides)
    return (Path(place) / MANIFEST_FILE).exists()


def _of_store(
    place: str,
    target: str | None,
    limit: int,
    sample_id: str | None,
    trust_remote_code: bool,
    cache: CacheSection | None,
) -> Found:
    reader = open_reader(place, cache, allow_incomplete=True)
    tokenizer = store_tokenizer(reader, target, trust_remote_code)
    wanted = [
        index
        for index, info in enumerate(reader.samples)
        if sample_id is None or sample_id in (info.id, info.id.rpartition("#")[0])
    ]
    if not wanted:
        raise _no_sample(place, str(sample_id), f"it has {len(reader):,}, e.g. {reader.samples[0].id!r}")
    shown = []
    for index in islice(wanted, None if sample_id else limit):
        ids, mask = (tensor.tolist() for tensor in reader.read_tokens(index))
        info = reader.samples[index]
        shown.append(shown_sample(tokenizer, info.id, ids, mask, info.source))
    tokens, supervised = (sum(getattr(info, name) for info in reader.samples) for name in ("tokens", "supervised"))
    about = f"{place}: {len(reader):,} samples, {tokens:,} tokens, {supervised:,} supervised"
    return Found(shown, about)


def _no_sample(place: str, sample_id: str, found: str) -> Exception:
    return problem_error(place, "show.no_sample", f"holds no sample {sample_id!r}; {found}", "give another --id")

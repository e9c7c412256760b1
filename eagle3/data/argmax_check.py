"""Whether a shard's greedy tokens are those of its last hidden states, for a few rows of it.

A few are enough for what goes wrong: rows of another sample, or shifted by some. It does not prove that every row is
right. Rounding decides between tokens that are about as likely, so the stored one must only come near the likeliest;
in an fp8 store, whose tokens are of the states before they were rounded, half of the rows must, and not as close.

Legend: R rows that are looked at, H target hidden, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3.data.open_shard import OpenShard
from eagle3.data.store_format import Manifest, ShardInfo, sample_rows
from eagle3.data.store_layout import StoreLayout
from eagle3.data.target_argmax import make_target_head
from eagle3.draft.loss import TargetHead
from eagle3.draft.states import dequantize
from eagle3.errors import Problem, raise_problems
from eagle3.files import sha256_file

_MIXED_UP = "if it is copied, verify the store that it is copied from; else report this: rows are mixed up"
_ROWS = 8
_ROUNDED = 2**-6
_SPREADS, _SPREADS_FP8 = 0.25, 1.0
_HEAD, _EMBEDDING, _NORM = "lm_head.weight", "embed_tokens.weight", "norm.weight"


def stored_head(folder: Path, manifest: Manifest) -> TargetHead | None:
    """The target's head of a store, on the CPU.

    None where there is nothing to compare: the store has no greedy tokens, or does not say the final norm's epsilon; or
    the head's file is not the manifest's to the last byte, so that sound shards might look wrong.
    """
    eps, path = manifest.target_config.get("rms_norm_eps"), folder / manifest.target_head.file
    if not manifest.layout.has_argmax or not isinstance(eps, int | float):
        return None
    try:
        if sha256_file(path) != manifest.target_head.sha256:
            return None
    except OSError:  # whoever reads all files names it
        return None
    with safe_open(path, "pt") as file:
        wanted = (_HEAD if _HEAD in file.keys() else _EMBEDDING, _NORM)  # noqa: SIM118 (no mapping)
        tensors = {name: file.get_tensor(name) for name in wanted}
    return make_target_head(tensors, manifest.target_config, manifest.contract.last_hidden_states)


def refuse_mixed_up(folder: Path, shards: Sequence[ShardInfo], layout: StoreLayout, head: TargetHead) -> None:
    """Removes shards that a writer made, and did not list yet, where a few of their greedy tokens are wrong.

    Raises:
        ProblemsError: kind `store.argmax`, one for each shard that was removed; as `argmax_problems`.
    """
    wrong = [
        problem for shard in shards for problem in argmax_problems(folder / shard.file, shard, layout, head, _MIXED_UP)
    ]
    for problem in wrong:
        Path(problem.where).unlink()
    raise_problems(wrong)


def argmax_problems(path: Path, shard: ShardInfo, layout: StoreLayout, head: TargetHead, fix: str) -> list[Problem]:
    """Kind `store.argmax`, one problem that names the first row that is wrong.

    Args:
        path: of the shard, whose size and header are right and whose ids are inside the vocabulary.
        head: all of the target's.
        fix: what to do about it.

    Raises:
        ProblemsError: as `OpenShard.read`.
    """
    stored = shard.tokens if layout.last_rows == "all" else shard.supervised
    if not layout.has_argmax or not stored:
        return []
    chosen = sorted({round(step * (stored - 1) / (_ROWS - 1)) for step in range(_ROWS)})
    file = OpenShard(path)

    def read(name: str) -> torch.Tensor:
        return torch.cat([file.rows(name, slice(row, row + 1)) for row in chosen])

    states, argmax = read("last_hidden_states"), read("target_argmax").long()
    if layout.scaled:
        states = dequantize(states, read("last_scales"))
    with torch.no_grad():
        logits = head.logits(states.to(head.lm_head.device)).float().cpu()
    best, found = logits.max(-1), logits.gather(1, argmax[:, None])[:, 0]
    spreads = _SPREADS_FP8 if layout.scaled else _SPREADS
    wrong = best.values - found > spreads * logits.std(-1) + _ROUNDED * best.values.abs()
    if not wrong.any() or (layout.scaled and 2 * int(wrong.sum()) < len(chosen)):
        return []
    at = int(wrong.nonzero()[0])
    places = zip(shard.samples, sample_rows(shard.samples, layout), strict=True)
    name, first = next((sample.id, last.start) for sample, (_, last) in places if chosen[at] < last.stop)
    message = (
        f"sample {name!r} has {int(argmax[at])} in row {chosen[at] - first} of its target_argmax, the target's head "
        f"says {int(best.indices[at])} of its last hidden states ({int(wrong.sum())} of {len(chosen)} rows are wrong)"
    )
    return [Problem(str(path), "store.argmax", message, fix)]

"""Rendered conversations kept in a folder, under a digest of all that they depend on; never under a name or a path."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from eagle3.data.chat.render import Rendered
from eagle3.data.chat.rendering import Rendering
from eagle3.data.chat.tokenizer import Tokenizer, template_text
from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, problem_error
from eagle3.files import digest_json, explained_os_errors, refuse_url, write_atomic

_VERSION = 1
"""To be raised whenever the same conversation is rendered otherwise."""
_COLUMNS = pyarrow.schema(
    [
        ("conversation", pyarrow.int64()),
        ("name", pyarrow.string()),
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("loss_mask", pyarrow.list_(pyarrow.bool_())),
        ("problem", pyarrow.string()),
    ]
)


def make_cache(folder: Path) -> None:
    """Makes the folder, before anything is rendered for it.

    Raises:
        ProblemsError: it is at a URL, or cannot be made.
    """
    refuse_url(folder, "data.cache", "give a folder")
    with explained_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


class RenderingCache:
    """Some conversations together in a file each; a file's name is a digest of them and all they are rendered with."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        template_kwargs: Mapping[str, Any],
        split_turns: str,
    ) -> None:
        template = template_text(tokenizer)
        made_with = [_VERSION, _tokenizer_content(tokenizer), template, dict(template_kwargs), split_turns]
        self._folder, self._made_with = folder, digest_json(made_with).encode()

    def path(self, conversations: Iterable[Conversation]) -> Path:
        """Where these are kept."""
        digest = hashlib.sha256(self._made_with)
        for conversation in conversations:
            digest.update(digest_json(vars(conversation)).encode())
        return self._folder / f"{digest.hexdigest()}.parquet"


def load_renderings(path: Path, conversations: Sequence[Conversation]) -> list[Rendering] | None:
    """What was kept of these conversations; None if nothing was.

    Raises:
        ProblemsError: kind `chat.cache`; the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        rows = [row for batch in table.to_batches() for row in batch.to_pylist()]
        samples: dict[int, list[tuple[str, Rendered]]] = {}
        problems: dict[int, list[Problem]] = {}
        for row in rows:
            if row["problem"] is None:
                rendered = Rendered(row["input_ids"], row["loss_mask"])
                samples.setdefault(row["conversation"], []).append((row["name"], rendered))
            else:
                problems.setdefault(row["conversation"], []).append(Problem(**json.loads(row["problem"])))
    except (pyarrow.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise problem_error(str(path), "chat.cache", f"is damaged: {error}", "remove that file") from error
    return [
        Rendering(item.id, tuple(samples.get(number, ())), tuple(problems.get(number, ())))
        for number, item in enumerate(conversations)
    ]


def save_renderings(path: Path, renderings: Sequence[Rendering]) -> None:
    """Keeps them; the file appears when it is whole, and of a write that fails nothing is left."""
    rows = [row for number, rendering in enumerate(renderings) for row in _rows(number, rendering)]
    table = pyarrow.Table.from_pylist(rows, _COLUMNS)
    write_atomic(path, lambda temporary: _write_table(table, temporary), shared=True)


def _write_table(table: pyarrow.Table, path: Path) -> None:
    with open(path, "wb") as file:
        pyarrow.parquet.write_table(table, file, compression="zstd", write_page_checksum=True)


def _rows(number: int, rendering: Rendering) -> Iterable[dict[str, Any]]:
    for name, item in rendering.samples:
        yield {"conversation": number, "name": name, "input_ids": item.input_ids, "loss_mask": item.loss_mask}
    for problem in rendering.problems:
        yield {"conversation": number, "problem": json.dumps(problem.to_dict())}


def _tokenizer_content(tokenizer: Tokenizer) -> Any:
    """All that decides which ids a text becomes."""
    marks = {str(index): repr(token) for index, token in tokenizer.added_tokens_decoder.items()}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        return [{key: backend[key] for key in backend if key not in ("truncation", "padding")}, marks]
    return [tokenizer.get_vocab(), marks, inspect.getsource(type(tokenizer))]

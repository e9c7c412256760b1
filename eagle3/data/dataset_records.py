"""Rows of a split of a data set: of the Hugging Face hub, or of a folder that is laid out like one."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.config import ConversationsConfig
from eagle3.data.remote_folder import client_errors
from eagle3.errors import problem_error

_HUB = re.compile(r"(?:hf://datasets/)?(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^/]+))?/?")


def dataset_rows(cfg: ConversationsConfig) -> Iterator[dict[str, Any]]:
    """The rows as they come, streamed; no cache is kept, and no code of the data set is run.

    Raises:
        ProblemsError: the data set or the split is not there, or cannot be read.
    """
    import datasets  # half a second

    found = None if Path(cfg.path).is_dir() else _HUB.fullmatch(cfg.path)
    name, revision = (cfg.path, None) if found is None else (found["id"], found["revision"])
    options = {"name": cfg.subset, "split": cfg.split, "revision": cfg.revision or revision}
    try:
        with tempfile.TemporaryDirectory() as cache:  # for its lock file
            yield from datasets.load_dataset(name, streaming=True, cache_dir=cache, **options)
    except (datasets.exceptions.DatasetsError, *client_errors()) as error:
        message = f"cannot be read: {error.__cause__ or error}"
        fix = "check data.path, data.split, data.subset and data.revision"
        raise problem_error(cfg.path, "conversations.unreadable", message, fix) from error
    except RuntimeError as error:  # datasets keeps a counter in shared memory
        if "shared memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise problem_error("/dev/shm", "disk.full", f"cannot write: {reason}", "free space there") from error

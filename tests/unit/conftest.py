import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group (gloo) of this process alone.

    What was made with it goes first: DDP as the last to hold its group waits, with the GIL, for a thread that may need
    it.
    """
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    gc.collect()
    distributed.destroy_process_group()

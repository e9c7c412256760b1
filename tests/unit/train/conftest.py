from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def one_thread_and_a_fresh_accelerator() -> Iterator[None]:
    """Runs are compared bit for bit, also with subprocesses; Accelerate keeps its settings per process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)

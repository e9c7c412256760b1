from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings per process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)

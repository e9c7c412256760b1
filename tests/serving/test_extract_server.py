"""`eagle3 extract` from a real, running SGLang gives the store that the Transformers engine gives."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import ExtractConfig
from eagle3.data.store import StoreReader
from eagle3.data.store_writer import StoreWriter
from eagle3.errors import ProblemsError
from eagle3.target.engines.sglang_server import start_command
from eagle3.target.extract import run_extract
from eagle3.target.probe import probe_dataset
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama
from eagle3.wiring.engines import ids_to_write
from eagle3.wiring.layers import LayerWiring, default_output_indices
from tests.serving.sglang_venv import SERVED_VERSION, running_server, smollm2
from tests.unit.target.cases import extract_config, write_conversations

LAYERS = [1, 3, 5]
SAMPLES = 12
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "data.jsonl", SAMPLES, answer_words=60)


@pytest.fixture
def running() -> Any:
    with ExitStack() as stack:
        yield stack


def as_told(target: Path, ids: Sequence[int], *more: str) -> list[str]:
    """Arguments of the very command that errors give, and some more."""
    python, _, module, *arguments = shlex.split(start_command(str(target), ids))
    assert (python, module) == ("python", "sglang.launch_server")
    return [*arguments, *more]


def served(target: Path, data: Path, output: Path, url: str, /, **values: Any) -> ExtractConfig:
    server = {"url": url, "attempts": 2, **values.pop("server", {})}
    return extract_config(target, data, output, engine="sglang", server=server, **values)


def refused(cfg: ExtractConfig) -> list[str]:
    with pytest.raises(ProblemsError) as error:
        run_extract(cfg)
    return [problem.kind for problem in error.value.problems]


def largest_errors(one: Path, other: Path) -> list[float]:
    """Of each slot and of the last hidden states: the median row's relative error, the largest of any sample."""
    mine, theirs = StoreReader(one), StoreReader(other)
    assert mine.contract == theirs.contract
    assert mine.samples == theirs.samples
    hidden, found = mine.contract.hidden_size, []
    for index in range(len(mine)):
        a, b = mine.read(index), theirs.read(index)
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_mask, b.loss_mask)
        states = [[*item.aux_hidden_states.split(hidden, dim=-1), item.last_hidden_states] for item in (a, b)]
        slots = [(x.float(), y.float()) for x, y in zip(*states, strict=True)]
        found.append([float(((x - y).norm(dim=-1) / y.norm(dim=-1)).median()) for x, y in slots])
    return torch.tensor(found).amax(dim=0).tolist()


def test_a_llama(data: Path, tmp_path: Path, running: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_llama(tmp_path / "target")
    layers: dict[str, Any] = {"output_indices": LAYERS}
    run_extract(extract_config(target, data, tmp_path / "whole", engine="transformers", **layers))
    command = as_told(target, LAYERS, "--dtype", "float32")
    url = running.enter_context(running_server(command, tmp_path / "server.log"))

    assert run_extract(served(target, data, tmp_path / "served", url, **layers)).extracted == SAMPLES

    assert max(largest_errors(tmp_path / "served", tmp_path / "whole")) < 1e-5
    assert probe_dataset(tmp_path / "served", str(target)).problems == []
    new = tmp_path / "new"
    assert refused(served(target, data, new, url, output_indices=[2, 4, 6])) == ["server.other_layers"]
    other = make_tiny_llama(tmp_path / "other", seed=1)
    unseen = {"check_target": False}
    assert refused(served(other, data, new, url, server=unseen, **layers)) == ["server.logits"]
    assert refused(served(target, data, new, url, target={"dtype": "bfloat16"}, server=unseen, **layers)) == [
        "server.dtype"
    ]
    assert not new.exists()
    with monkeypatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: "always the same")
        assert refused(served(target, data, tmp_path / "cached", url, **layers)) == ["server.prefix_cache"]

    write = StoreWriter.write_shard

    def write_and_end_the_server(self: StoreWriter, samples: Any) -> None:
        write(self, samples)
        running.close()

    monkeypatch.setattr(StoreWriter, "write_shard", write_and_end_the_server)
    assert refused(served(target, data, new, url, shard_max_samples=4, **layers)) == ["server.down"]
    assert len(StoreReader(new, allow_incomplete=True)) == 4


def test_a_kimi_whose_ids_are_counted_otherwise_from_two_servers(
    data: Path, tmp_path: Path, running: ExitStack
) -> None:
    target = make_tiny_kimi(
        tmp_path / "target", num_hidden_layers=8, moe_intermediate_size=64, max_position_embeddings=4096
    )
    wiring = LayerWiring((2, 4, 6), 8)
    layers: dict[str, Any] = {"output_indices": list(wiring.output_indices)}
    ids = ids_to_write(wiring, "sglang", SERVED_VERSION, "kimi_k25").ids
    assert ids == wiring.boundaries
    run_extract(extract_config(target, data, tmp_path / "whole", engine="transformers", **layers))
    told = as_told(target, ids, "--dtype", "float32", "--text-only")
    hook = told.index("--forward-hooks")
    model = ["--model-path", str(target), "--dtype", "float32", "--chunked-prefill-size", "-1"]
    commands = {
        "aux": [*told[:hook], *told[hook + 2 :]],
        "last": [*model, "--enable-return-hidden-states", "--text-only"],
    }
    servers = [running_server(command, tmp_path / f"{name}.log") for name, command in commands.items()]
    with ThreadPoolExecutor(2) as pool:
        aux, last = pool.map(running.enter_context, servers)
    output = tmp_path / "served"

    assert refused(served(target, data, output, aux, **layers)) == ["server.last_states"]
    assert refused(served(target, data, output, last, **layers)) == ["server.aux_states_off"]
    assert not output.exists()
    run_extract(served(target, data, output, aux, server={"last_states_url": last}, **layers))

    assert max(largest_errors(output, tmp_path / "whole")) < 1e-4


def test_smollm2_in_bfloat16(data: Path, tmp_path: Path, running: ExitStack) -> None:
    target = smollm2()
    layers = default_output_indices(30)
    values = {
        "output_indices": list(layers), "store_dtype": "bfloat16", "target": {"dtype": "bfloat16"}
    }  # fmt: skip
    command = as_told(target, layers, "--dtype", "bfloat16")
    url = running.enter_context(running_server(command, tmp_path / "server.log"))
    run_extract(extract_config(target, data, tmp_path / "whole", engine="transformers", **values))

    run_extract(served(target, data, tmp_path / "served", url, **values))

    assert max(largest_errors(tmp_path / "served", tmp_path / "whole")) < 0.05
    assert probe_dataset(tmp_path / "served", str(target)).problems == []

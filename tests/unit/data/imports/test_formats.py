"""Each layout as it is documented in docs/import.md, and each way in which a file can be something else."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3.data.imports.formats import read_modelopt, read_specforge, read_speculators
from eagle3.data.imports.sample import RawSample
from eagle3.errors import ProblemsError
from tests.dumps import (
    DumpSample,
    modelopt_values,
    random_dump_sample,
    specforge_values,
    speculators_values,
)


class RunsCode:
    """What a pickle can do."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.witness),)


def kinds(read: Callable[[Path], RawSample], path: Path) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        read(path)
    assert {problem.where for problem in caught.value.problems} == {str(path)}
    return [problem.kind for problem in caught.value.problems]


def assert_equal(raw: RawSample, sample: DumpSample, mask: bool = True) -> None:
    assert torch.equal(raw.input_ids, sample.ids)
    assert torch.equal(raw.aux_hidden_states, torch.cat(list(sample.aux), dim=-1))
    assert torch.equal(raw.last_hidden_states, sample.last)
    if mask:
        assert raw.loss_mask is not None and torch.equal(raw.loss_mask, sample.mask)
    else:
        assert raw.loss_mask is None


@pytest.mark.parametrize("batched", [False, True])
def test_specforge_with_and_without_batch_dimension(tmp_path: Path, batched: bool) -> None:
    sample = random_dump_sample()
    values = {key: tensor.squeeze(0) for key, tensor in specforge_values(sample).items()}
    torch.save({key: tensor[None] if batched else tensor for key, tensor in values.items()}, tmp_path / "data_0.ckpt")

    assert_equal(read_specforge(tmp_path / "data_0.ckpt"), sample)


def test_specforge_compressed(tmp_path: Path) -> None:
    sample = random_dump_sample()
    torch.save(specforge_values(sample), tmp_path / "plain")
    (tmp_path / "data_0.ckpt.gz").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))

    assert_equal(read_specforge(tmp_path / "data_0.ckpt.gz"), sample)


@pytest.mark.parametrize("mask", [True, False])
def test_modelopt_with_and_without_mask(tmp_path: Path, mask: bool) -> None:
    sample = random_dump_sample()
    values = modelopt_values(sample)
    if not mask:
        del values["loss_mask"]
    torch.save(values, tmp_path / "abc.pt")

    assert_equal(read_modelopt(tmp_path / "abc.pt"), sample, mask)


def test_speculators_safetensors(tmp_path: Path) -> None:
    sample = random_dump_sample()
    save_file(speculators_values(sample), tmp_path / "hs_0.safetensors")

    assert_equal(read_speculators(tmp_path / "hs_0.safetensors"), sample, mask=False)


def test_older_speculators_list(tmp_path: Path) -> None:
    sample = random_dump_sample()
    values = {"input_ids": sample.ids, "hidden_states": [*sample.aux, sample.last], "loss_mask": sample.mask}
    torch.save(values, tmp_path / "data_0.pt")

    assert_equal(read_speculators(tmp_path / "data_0.pt"), sample)


def test_states_are_mapped_not_read(tmp_path: Path) -> None:
    sample = random_dump_sample(tokens=5000, hidden=512)
    torch.save(specforge_values(sample), tmp_path / "data_0.ckpt")
    before = resident()

    raw = read_specforge(tmp_path / "data_0.ckpt")

    assert resident() - before < raw.aux_hidden_states.nbytes / 2


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_never_runs(tmp_path: Path, zipped: bool) -> None:
    path, witness = tmp_path / "data_0.ckpt", tmp_path / "it-ran"
    values = {**specforge_values(random_dump_sample()), "extra": RunsCode(witness)}
    if zipped:
        torch.save(values, path)
    else:
        path.write_bytes(pickle.dumps(values))

    assert kinds(read_specforge, path) == ["import.pickle"]
    assert not witness.exists()


def test_a_numpy_array_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "abc.pt"
    torch.save({**modelopt_values(random_dump_sample()), "input_ids": np.arange(12)}, path)

    with pytest.raises(ProblemsError, match="numpy") as caught:
        read_modelopt(path)
    assert caught.value.problems[0].kind == "import.pickle"


@pytest.mark.parametrize("kept", [0, 3, 200, 0.5, -30])
@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path, kept: float, suffix: str) -> None:
    path = tmp_path / f"data_0{suffix}"
    torch.save(specforge_values(random_dump_sample()), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    whole = gzip.compress(whole) if suffix.endswith(".gz") else whole
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])

    assert kinds(read_specforge, path) == ["import.damaged"]


def test_a_safetensors_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    save_file(speculators_values(random_dump_sample()), path)
    path.write_bytes(path.read_bytes()[:-5])

    assert kinds(read_speculators, path) == ["safetensors.truncated"]


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")

    with pytest.raises(ProblemsError, match="git lfs pull"):
        read_specforge(path)


@pytest.mark.parametrize("key", ["input_ids", "loss_mask", "hidden_state", "aux_hidden_state"])
def test_specforge_lacks_a_key(tmp_path: Path, key: str) -> None:
    values = specforge_values(random_dump_sample())
    del values[key]
    torch.save(values, tmp_path / "data_0.ckpt")

    assert kinds(read_specforge, tmp_path / "data_0.ckpt") == ["import.key"]


@pytest.mark.parametrize("key", ["input_ids", "hidden_states", "aux_hidden_states"])
def test_modelopt_lacks_a_key(tmp_path: Path, key: str) -> None:
    values = modelopt_values(random_dump_sample())
    del values[key]
    torch.save(values, tmp_path / "abc.pt")

    assert kinds(read_modelopt, tmp_path / "abc.pt") == ["import.key"]


@pytest.mark.parametrize("key", ["token_ids", "hidden_states"])
def test_speculators_lacks_a_key(tmp_path: Path, key: str) -> None:
    values = speculators_values(random_dump_sample())
    del values[key]
    save_file(values, tmp_path / "hs_0.safetensors")

    assert kinds(read_speculators, tmp_path / "hs_0.safetensors") == ["import.key"]


def test_every_missing_key_is_named(tmp_path: Path) -> None:
    torch.save({"input_ids": None}, tmp_path / "data_0.ckpt")

    assert kinds(read_specforge, tmp_path / "data_0.ckpt") == ["import.key"] * 4


def test_sparse_states_are_refused(tmp_path: Path) -> None:
    values = specforge_values(random_dump_sample())
    values["hidden_state"] = values["hidden_state"].float().to_sparse()
    torch.save(values, tmp_path / "data_0.ckpt")

    assert kinds(read_specforge, tmp_path / "data_0.ckpt") == ["import.key"]


def test_a_list_at_the_top_is_refused(tmp_path: Path) -> None:
    torch.save([modelopt_values(random_dump_sample())], tmp_path / "abc.pt")

    assert kinds(read_modelopt, tmp_path / "abc.pt") == ["import.format"]


def test_fp8_states_of_speculators_are_refused(tmp_path: Path) -> None:
    values = speculators_values(random_dump_sample())
    values["hidden_states"] = values["hidden_states"].to(torch.float8_e4m3fn)
    save_file({**values, "hidden_states_scales": torch.ones(12, 1)}, tmp_path / "hs_0.safetensors")

    assert kinds(read_speculators, tmp_path / "hs_0.safetensors") == ["import.dtype"]


def test_speculators_states_of_one_layer_side_by_side_are_refused(tmp_path: Path) -> None:
    values = speculators_values(random_dump_sample())
    save_file({**values, "hidden_states": values["hidden_states"].flatten(1)}, tmp_path / "hs_0.safetensors")

    assert kinds(read_speculators, tmp_path / "hs_0.safetensors") == ["import.shape"]


@pytest.mark.parametrize("states", [torch.zeros(3, 4), [torch.zeros(3, 4)], [torch.zeros(3, 4), torch.zeros(2, 4)]])
def test_older_speculators_states_of_another_form_are_refused(tmp_path: Path, states: Any) -> None:
    torch.save({"input_ids": torch.arange(3), "hidden_states": states}, tmp_path / "data_0.pt")

    assert kinds(read_speculators, tmp_path / "data_0.pt")[0] in ("import.key", "import.shape")

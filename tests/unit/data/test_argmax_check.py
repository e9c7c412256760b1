"""Greedy tokens of other rows than the last hidden states are noticed when they are written, and by the deep check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.data import argmax_check, store_writer
from eagle3.data.argmax_check import stored_head
from eagle3.data.store import StoredSample, verify
from eagle3.data.store_format import Manifest, load_manifest
from eagle3.data.store_layout import LastRows
from eagle3.data.store_repair import repair
from eagle3.data.target_argmax import greedy_tokens, make_target_head
from eagle3.errors import ProblemsError
from tests.rings import open_writer, ring_plan, ring_samples
from tests.stores import TARGET_CONFIG, VOCAB, greedy, random_contract, write_random_store

from .cases import kinds
from .joint_cases import joint, shard_samples, write

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row late": lambda argmax: argmax.roll(1),
    "one row early": lambda argmax: argmax.roll(-1),
    "of the other end": lambda argmax: argmax.flip(0),
    "the second best": lambda argmax: (argmax + 1) % VOCAB,
}


def head() -> dict[str, torch.Tensor]:
    """That of `write_random_store`."""
    generator = torch.Generator().manual_seed(0)
    torch.randint(6, 17, (12,), generator=generator)
    tensors = {"embed_tokens.weight": torch.randn(VOCAB, 16, generator=generator), "norm.weight": torch.ones(16)}
    return {**tensors, "lm_head.weight": torch.randn(VOCAB, 16, generator=generator)}


def changed(how: str, dtype: str) -> Callable[[StoredSample], StoredSample]:
    """The greedy tokens of every sample, changed."""

    def change(sample: StoredSample) -> StoredSample:
        made = greedy(sample, head())
        assert made.target_argmax is not None
        if dtype != "float32":
            aux, last = made.aux_hidden_states.bfloat16(), made.last_hidden_states.bfloat16()
            made = replace(made, aux_hidden_states=aux, last_hidden_states=last)
        return replace(made, target_argmax=CHANGES[how](made.target_argmax) if how else made.target_argmax)

    return change


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("how", ["", *CHANGES])
def test_rows_that_are_mixed_up_are_not_written_and_are_found_by_the_deep_check(
    tmp_path: Path, how: str, dtype: str, last_rows: LastRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = replace(random_contract(), dtype=dtype)

    def store(name: str) -> Path:
        return write_random_store(tmp_path / name, contract=contract, change=changed(how, dtype), last_rows=last_rows)

    if not how:
        assert verify(store("right"), deep=True) == []
        return
    with pytest.raises(
        ProblemsError, match=r"sample 's00' has .* of its target_argmax, the target's head says"
    ) as error:
        store("wrong")
    assert kinds(error.value) == ["store.argmax"]
    assert not list((tmp_path / "wrong").glob("shard-*"))

    monkeypatch.setattr(store_writer, "refuse_mixed_up", lambda *_: None)
    written = store("written")
    assert verify(written) == []
    problems = verify(written, deep=True)
    assert [problem.kind for problem in problems] == ["store.argmax"] * 3
    assert problems[1].where == str(written / "shard-00001.safetensors") and "'s04'" in problems[1].message


def test_a_token_that_is_as_likely_but_for_rounding_is_right(tmp_path: Path) -> None:
    """As another kernel, or the states before they were rounded, may have it."""
    target = make_target_head(head(), TARGET_CONFIG, "post_norm")

    def by_a_hair(sample: StoredSample) -> StoredSample:
        last = sample.last_hidden_states
        noise = 1e-3 * torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
        return replace(sample, target_argmax=greedy_tokens(last + noise, target))

    assert verify(write_random_store(tmp_path / "store", change=by_a_hair), deep=True) == []


def test_shards_of_several_processes_are_looked_at_before_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [
        replace(item, target_argmax=item.target_argmax.roll(1))
        for item in shard_samples(2)
        if item.target_argmax is not None
    ]
    monkeypatch.setattr("tests.unit.data.joint_cases.shard_samples", lambda number: samples)
    with joint(tmp_path / "store") as store:
        with pytest.raises(ProblemsError) as error:
            write(store, 2)
        assert kinds(error.value) == ["store.argmax"]
        assert store.manifest().shards == () and not list((tmp_path / "store").glob("shard-*"))


def test_a_rings_shards_are_looked_at_before_they_are_listed(tmp_path: Path) -> None:
    samples = ring_samples()
    wrong = [
        replace(item, target_argmax=item.target_argmax.roll(1)) for item in samples if item.target_argmax is not None
    ]
    plan = ring_plan(samples)
    with open_writer(tmp_path / "ring", plan, samples) as writer:
        assert writer.next_unit() == [0]
        with pytest.raises(ProblemsError) as error:
            writer.write_shard(0, [wrong[place] for place in plan.shards[0].samples])
        assert kinds(error.value) == ["store.argmax"]
        assert not list((tmp_path / "ring").glob("shard-*"))
        writer.write_shard(0, [samples[place] for place in plan.shards[0].samples])


def test_without_the_norms_epsilon_or_greedy_tokens_there_is_nothing_to_compare(tmp_path: Path) -> None:
    folder = write_random_store(tmp_path / "store")
    manifest: Manifest = load_manifest(folder)
    assert stored_head(folder, manifest) is not None
    assert stored_head(folder, replace(manifest, target_config={})) is None
    assert stored_head(folder, replace(manifest, layout=replace(manifest.layout, version=2))) is None


def test_a_few_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = argmax_check.OpenShard.rows

    def counted(self: argmax_check.OpenShard, name: str, chosen: slice) -> torch.Tensor:
        rows.append(chosen.stop - chosen.start)
        return real(self, name, chosen)

    monkeypatch.setattr(argmax_check.OpenShard, "rows", counted)
    write_random_store(tmp_path / "store", [(200, (2, 200))] * 4)
    assert rows == [1] * 16


def test_a_damaged_head_does_not_make_sound_shards_look_wrong(tmp_path: Path) -> None:
    """Else `data repair` would drop them all."""
    folder = write_random_store(tmp_path / "store")
    path = folder / "target_head.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    save_file(tensors, path)
    if path.stat().st_size != load_manifest(folder).target_head.bytes:
        pytest.fail("the sizes differ, so that the check of sizes finds it")
    assert [(problem.kind, problem.where) for problem in verify(folder, deep=True)] == [("store.checksum", str(path))]
    report = repair(folder, yes=True)
    assert report.head and not report.dropped

"""`init_from`: the shape of a run that starts from a drafter, and its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.cli import main
from eagle3.config import ServeConfig, TrainConfig, dump_config, load_config
from eagle3.draft.config import RopeConfig
from eagle3.errors import ProblemsError
from eagle3.serve.export import export_run
from eagle3.train.plan import plan_memory
from eagle3.train.setup import make_setup
from eagle3.train.trainer import run_training
from tests.stores import train_config
from tests.unit.train.warm_cases import make_first_run, warm_config, write_as_another_tool


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_first_run(tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize(("eps", "kept"), [(3e-5, 3e-5), (None, 1e-6), (1e-5, 1e-5)])
def test_the_epsilon_of_its_norms_is_its_own(first: Path, tmp_path: Path, eps: float | None, kept: float) -> None:
    start = write_as_another_tool(first / "export", tmp_path / "start", config={"rms_norm_eps": eps})
    setup = make_setup(warm_config(first, tmp_path / "run", start))
    assert setup.module.model.config.rms_norm_eps == setup.module.model.norm.eps == kept
    assert any("the target's is 1e-05" in note for note in setup.notes) is (kept != 1e-5)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", 500.0, 2)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 70.0}}, RopeConfig(rope_theta=70.0)),
    ],
)  # fmt: skip
def test_rope_is_read_in_both_layouts(first: Path, tmp_path: Path, keys: dict[str, object], rope: RopeConfig) -> None:
    start = write_as_another_tool(first / "export", tmp_path / "start", config=keys)
    assert make_setup(warm_config(first, tmp_path / "run", start)).module.model.config.rope == rope


def test_the_shape_follows_the_checkpoint_and_what_is_named_must_agree(first: Path, tmp_path: Path) -> None:
    shape = {"intermediate_size": 40, "num_key_value_heads": 2, "fc_norm": True, "norm_output": True}
    draft = {"draft_vocab_size": 20, "rope": {"rope_theta": 500.0}, **shape}
    run_training(train_config(first / "store", tmp_path / "other", draft=draft, max_steps=1))
    export_run(ServeConfig(run=str(tmp_path / "other"), output=str(tmp_path / "out")))

    made = make_setup(warm_config(first, tmp_path / "run", tmp_path / "out")).module.model.config

    assert {name: getattr(made, name) for name in shape} == shape
    assert (made.rope.rope_theta, made.draft_vocab_size) == (500.0, 20)
    assert make_setup(warm_config(first, tmp_path / "run", tmp_path / "out", draft=draft)).module.model.config == made
    named = {
        "intermediate_size": 24, "num_key_value_heads": 1, "fc_norm": False, "norm_before_fc": True, "head_dim": 4,
        "rope": {"rope_theta": 100.0}, "draft_vocab_size": 24, "max_position_embeddings": 64, "num_attention_heads": 1,
        "num_hidden_layers": 2,
    }  # fmt: skip
    with pytest.raises(ProblemsError) as caught:
        make_setup(warm_config(first, tmp_path / "run", tmp_path / "out", draft=named))
    assert {problem.kind for problem in caught.value.problems} == {"init.shape"}
    assert {problem.where for problem in caught.value.problems} == {f"draft.{name}" for name in named}


def test_options_left_out_of_a_stored_config_stay_left_out(tmp_path: Path) -> None:
    left, given = (train_config(tmp_path, tmp_path, draft=draft) for draft in ({}, {"fc_norm": False}))
    for config, names in ((left, False), (given, True)):
        (tmp_path / "config.yaml").write_text(dump_config(config))
        read = load_config(TrainConfig, tmp_path / "config.yaml")
        assert read == config and read.draft.names("fc_norm") is names and not read.draft.fc_norm


def test_a_plan_has_the_shape_of_the_checkpoint_and_reads_no_weights(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = warm_config(first, tmp_path / "run", first / "export", mixed_precision="bf16", draft={})
    monkeypatch.setattr("eagle3.serve.given_draft.safe_open", None)
    planned = plan_memory(config, 64.0).render()
    monkeypatch.undo()
    counts = make_setup(config).module.model.config.parameter_counts()
    assert f"drafter: {counts['total']:,} parameters, {counts['trainable']:,} of them trained" in planned
    (tmp_path / "config.yaml").write_text(dump_config(config.model_copy(update={"init_from": str(tmp_path / "none")})))
    command = ["train", "--plan", "--device-memory", "64", "--config", str(tmp_path / "config.yaml")]
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2

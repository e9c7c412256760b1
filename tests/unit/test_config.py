"""Configs: every shipped file parses, overrides apply, and every mistake is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.config import (
    BenchConfig,
    DecodeConfig,
    ExtractConfig,
    ImportConfig,
    LaunchConfig,
    PlanConfig,
    RegenerateConfig,
    Section,
    ServeConfig,
    SweepConfig,
    TrainConfig,
    dump_config,
    field_help,
    load_config,
)
from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.errors import ProblemsError
from tests.unit.serve.planner.cases import INCIDENT

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS: dict[str, type[Section]] = {
    "regenerate": RegenerateConfig,
    "extract": ExtractConfig,
    "import": ImportConfig,
    "train": TrainConfig,
    "serve": ServeConfig,
}
TARGETS = ("kimi-k2.5", "deepseek-v3", "llama-3.1-8b", "qwen3-8b", "smollm2-135m", "tiny-kimi")
LAUNCHED = ("kimi-k2.5", "smollm2-135m")
MINIMAL = ["dataset=d", "output=o", "output_indices=[2,30,58]"]


def test_every_target_has_its_five_configs() -> None:
    shipped = {path.relative_to(CONFIGS) for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "accelerate"}

    five = {Path(target) / f"{command}.yaml" for target in TARGETS for command in MODELS}
    launches = {Path(target) / "launch.yaml" for target in LAUNCHED}
    others = {Path("kimi-k2.5/plan.yaml")} | {
        Path("smollm2-135m") / f"{name}.yaml" for name in ("decode", "bench", "sweep")
    }
    assert shipped == five | launches | others


@pytest.mark.parametrize("target", LAUNCHED)
def test_a_shipped_launch_serves_what_the_export_wrote(target: str) -> None:
    serve = load_config(ServeConfig, CONFIGS / target / "serve.yaml")
    launch = load_config(LaunchConfig, CONFIGS / target / "launch.yaml")

    assert (launch.checkpoint, launch.engine, launch.engine_version) == (
        serve.output,
        serve.engine,
        serve.engine_version,
    )
    assert launch.cuda_graphs and launch.verified_tokens == launch.steps + 1


def test_the_shipped_bench_measures_what_the_shipped_launch_starts() -> None:
    bench = load_config(BenchConfig, CONFIGS / "smollm2-135m" / "bench.yaml")
    launch = load_config(LaunchConfig, CONFIGS / "smollm2-135m" / "launch.yaml")

    assert bench.target.path == launch.target and bench.urls == [f"http://localhost:{launch.port}"]
    sweep = load_config(SweepConfig, CONFIGS / "smollm2-135m" / "sweep.yaml")
    assert sweep.load.sets == bench.load.sets and sweep.target == bench.target
    assert (sweep.launch.checkpoint, sweep.launch.engine_version) == (launch.checkpoint, launch.engine_version)
    assert next(section.path for section in bench.load.sets.values()) == "datasets/eval/mt_bench.jsonl"


def test_the_shipped_plan_is_the_incident() -> None:
    plan = load_config(PlanConfig, CONFIGS / "kimi-k2.5" / "plan.yaml", ["scale.verify=0.73"])

    assert plan == PlanConfig.model_validate({**INCIDENT, "scale": {"verify": 0.73}})
    assert load_config(PlanConfig, None, ["baseline=[{batch: 4, tok_s: 200}]"]).baselines == {4: 200}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("acceptance=1.5", "a share from 0 to 1, or a list"),
        ("acceptance=[]", "a share from 0 to 1, or a list"),
        ("acceptance=[0.5,true]", "a share from 0 to 1, or a list"),
        ("acceptance=.nan", "a share from 0 to 1, or a list"),
        ("baseline=0", "greater than 0"),
        ("baseline=[{tok_s: 1},{tok_s: 2}]", "a batch twice"),
        ("points=[{steps: 5}]", "nothing was measured at 5 steps"),
        ("points=[{steps: 5, draft_tokens: 5, tok_s: 1}]", "less than steps + 1 = 6"),
        ("points=[{steps: 5, draft_tokens: 9, tok_s: 1}]", "is a tree: give its acceptance_length"),
        ("trees=[{steps: 5, topk: 2, draft_tokens: 5}]", "cannot hold a path"),
        ("trees=[{steps: 5, topk: 1, draft_tokens: 6}]", "greater than or equal to 2"),
        ("acceptance_fall=[0.5,0.9]", "a range that holds 1"),
        ("steps=[2,2]", "given twice"),
        ("batches=[]", "at least 1"),
    ],
)
def test_a_plans_mistakes_are_named(wrong: str, said: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(PlanConfig, None, [wrong])

    (problem,) = caught.value.problems
    assert problem.kind == "config.value" and said in problem.message


def test_acceptance_comes_from_one_place() -> None:
    with pytest.raises(ProblemsError, match="leave one out"):
        load_config(PlanConfig, None, ["acceptance=0.5", "acceptance_file=x.json"])


def test_the_shipped_decoding_goes_with_the_training() -> None:
    decode = load_config(DecodeConfig, CONFIGS / "smollm2-135m" / "decode.yaml")
    train = load_config(TrainConfig, CONFIGS / "smollm2-135m" / "train.yaml")
    extract = load_config(ExtractConfig, CONFIGS / "smollm2-135m" / "extract.yaml")

    assert (decode.checkpoint, decode.target) == (train.output, extract.target)
    assert (decode.verified, decode.kind, decode.verifies) == (4, "likeliest", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["draft_tokens=5"], "a chain of 3 steps has 4"),
        (["topk=2", "draft_tokens=3"], "takes 4 to 11"),
        (["topk=2", "draft_tokens=12"], "takes 4 to 11"),
        (["top_p=0.9", "top_k=5"], "top_p and top_k at temperature 0"),
        (["drafts=drawn"], "draws nothing"),
        (["temperature=1", "verify=true"], "not to be compared"),
        (["prompts=[]"], "at least 1"),
    ],
)
def test_a_decodings_mistakes_are_named(given: list[str], said: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(DecodeConfig, None, ["checkpoint=c", "target.path=t", "prompts=[p]", *given])

    (problem,) = caught.value.problems
    assert problem.kind == "config.value" and said in problem.message


def test_a_sampled_chain_is_drawn_and_nothing_else() -> None:
    def kind(*given: str) -> str:
        return load_config(DecodeConfig, None, ["checkpoint=c", "target.path=t", "prompts=[p]", *given]).kind

    assert kind("temperature=1") == "drawn"
    assert kind("temperature=1", "topk=2") == kind("topk=2") == kind() == "likeliest"


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_configs_parse_and_agree(target: str) -> None:
    regenerate = load_config(RegenerateConfig, CONFIGS / target / "regenerate.yaml")
    extract = load_config(ExtractConfig, CONFIGS / target / "extract.yaml")
    train = load_config(TrainConfig, CONFIGS / target / "train.yaml")
    serve = load_config(ServeConfig, CONFIGS / target / "serve.yaml")
    dump = load_config(ImportConfig, CONFIGS / target / "import.yaml")

    assert dump.target == extract.target and dump.output == extract.output
    assert (dump.layers, dump.numbering) == (extract.output_indices, "output_index")
    assert regenerate.target == extract.target
    assert regenerate.output == extract.data.path
    assert extract.output_indices == train.output_indices
    assert extract.output == train.dataset
    assert serve.run == train.output


@pytest.mark.parametrize("target", TARGETS)
def test_what_no_gpu_holds_is_streamed(target: str) -> None:
    extract = load_config(ExtractConfig, CONFIGS / target / "extract.yaml")
    large = target in ("kimi-k2.5", "deepseek-v3")

    assert extract.engine == ("streamed" if large else "auto")
    assert extract.stream.chunk_tokens == (524_288 if large else None)


def test_kimi_config_is_the_published_drafter() -> None:
    draft = load_config(TrainConfig, CONFIGS / "kimi-k2.5" / "train.yaml").draft
    assert draft.rope is not None
    shape = DraftConfig.from_target(
        {"hidden_size": 7168, "vocab_size": 163840, "rms_norm_eps": 1e-5},
        num_aux=3,
        rope=RopeConfig(draft.rope.rope_type, draft.rope.rope_theta),
        **draft.model_dump(exclude={"init", "fc_init", "rope"}),
    )

    counts = shape.parameter_counts()

    assert round(counts["total"] / 1e9, 2) == 2.62
    assert round(counts["trainable"] / 1e9, 2) == 1.45


def test_override_replaces_a_nested_value() -> None:
    config = load_config(TrainConfig, None, [*MINIMAL, "optim.learning_rate=1e-3", "ttt.steps=3"])

    assert config.optim.learning_rate == 1e-3
    assert config.ttt.steps == 3


def test_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, [*MINIMAL, "optim.learnin_rate=1e-3"])

    (problem,) = caught.value.problems
    assert problem.kind == "config.unknown_key"
    assert problem.where == "command line"
    assert "optim.learning_rate" in problem.fix


def test_a_problem_of_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("epochs: 0\ndataset: d\noutput: o\noutput_indices: [1]\n")

    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, path, ["ttt.steps=0"])

    assert {problem.where for problem in caught.value.problems} == {str(path), "command line"}


def test_help_gives_choices_and_what_an_optional_section_needs() -> None:
    fields = {key: (default, text) for key, default, text in field_help(TrainConfig)}

    assert "(cosine | linear | constant)" in fields["optim.schedule"][1]
    assert fields["target.path"][0] == "required if target is given"
    assert fields["dataset"][0] == "required"


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, ["dataset=d", "ttt.steps=0", "epochs=two", "nonsense=1"])

    assert sorted(problem.kind for problem in caught.value.problems) == [
        "config.missing",
        "config.missing",
        "config.unknown_key",
        "config.value",
        "config.value",
    ]


@pytest.mark.parametrize("value", ["4.0", "true", "'7'", "-1", "0", "[1]", str(10**30)])
def test_a_count_is_a_positive_whole_number(value: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, [*MINIMAL, f"draft.draft_vocab_size={value}"])

    assert [problem.kind for problem in caught.value.problems] == ["config.value"]


@pytest.mark.parametrize("given", ["batch_size=1", "batch_size=4", "pack=false", "pack=true"])
def test_a_budget_of_tokens_stands_in_place_of_rows(given: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, [*MINIMAL, "batch_tokens=4096", given])

    (problem,) = caught.value.problems
    name, value = given.split("=")
    assert problem.kind == "config.value"
    assert problem.message.startswith(f"batch_tokens=4096 is given together with {name}={value.capitalize()}: ")
    assert problem.message.endswith(f"leave out batch_tokens or {name}")


def test_keys_of_a_file_and_of_the_command_line_that_do_not_go_together_name_both(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("max_length: 4096", encoding="utf-8")
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, path, [*MINIMAL, "batch_tokens=64"])
    assert [problem.where for problem in caught.value.problems] == [f"{path}, command line"]


def test_a_budget_that_the_longest_sample_exceeds_is_refused() -> None:
    with pytest.raises(ProblemsError, match="batch_tokens=4095 is less than max_length=4096, so a sample of that"):
        load_config(TrainConfig, None, [*MINIMAL, "batch_tokens=4095", "max_length=4096"])

    assert load_config(TrainConfig, None, [*MINIMAL, "batch_tokens=4096", "max_length=4096"]).heldout_rows == 1


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "\x00", "\ufffe"])
def test_a_file_that_is_no_mapping_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, path)

    (problem,) = caught.value.problems
    assert problem.where == str(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"config\.unreadable"):
        load_config(TrainConfig, tmp_path / "none.yaml")


@pytest.mark.parametrize("item", ["epochs", "=1", "a..b=1", "epochs.x=1", "epochs=[1"])
def test_a_malformed_override_is_named(item: str) -> None:
    with pytest.raises(ProblemsError, match=r"config\.override"):
        load_config(TrainConfig, None, [*MINIMAL, "epochs=1", item])


def test_dumped_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(TrainConfig, CONFIGS / "kimi-k2.5" / "train.yaml")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))

    assert load_config(TrainConfig, path) == config


@pytest.mark.parametrize("model", MODELS.values())
def test_every_field_has_help(model: type[Section]) -> None:
    assert [key for key, _, text in field_help(model) if not text] == []


@pytest.mark.parametrize(
    "text",
    [
        "seed: 2024-13-45",
        "seed: !!int abc",
        "a: !!timestamp abc",
        "a: " + "[" * 3000,
        "seed: " + "9" * 5000,
        "epochs: 1\nepochs: 2",
        "optim: {eps: 1.0, eps: 2.0}",
    ],
)
def test_yaml_that_python_cannot_hold_or_that_says_a_thing_twice_is_not_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProblemsError, match=r"config\.not_yaml"):
        load_config(TrainConfig, path)


def test_a_merge_key_is_no_repeated_key(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("draft: {rope: &r {rope_theta: 5.0}}\noptim: {<<: {eps: 1.0}, eps: 2.0}\n")
    assert load_config(TrainConfig, path, MINIMAL).optim.eps == 2.0


def test_an_override_is_a_date_that_cannot_be() -> None:
    with pytest.raises(ProblemsError, match=r"config\.override"):
        load_config(TrainConfig, None, [*MINIMAL, "seed=2024-13-45"])


def test_a_quoted_number_stays_a_text_and_a_bare_exponent_is_a_number() -> None:
    overrides = [*MINIMAL, 'output="123"', "dataset='1e5'", "optim.learning_rate=1e-4"]
    config = load_config(TrainConfig, None, overrides)
    assert (config.output, config.dataset, config.optim.learning_rate) == ("123", "1e5", 1e-4)


def test_no_and_off_are_the_words_they_look_like() -> None:
    config = load_config(TrainConfig, None, [*MINIMAL, "mixed_precision=no", "tracking.wandb=off"])
    assert (config.mixed_precision, config.tracking.wandb) == ("no", "off")


@pytest.mark.parametrize(
    "item",
    [
        "output=''",
        "eval_dataset=''",
        "seed=9223372036854775808",
        "output_indices=[true, 3, 5]",
        "output_indices=['2', 3, 5]",
        "optim.weight_decay=.inf",
    ],
)
def test_a_value_that_would_be_taken_for_another_is_refused(item: str) -> None:
    with pytest.raises(ProblemsError, match=r"config\.value"):
        load_config(TrainConfig, None, [*MINIMAL, item])


@pytest.mark.parametrize("value", ["2020-01-01", "!!binary aGk="])
def test_template_arguments_are_json(value: str) -> None:
    overrides = ["target.path=t", "data.path=d", "output=o", f"data.chat_template_kwargs={{a: {value}}}"]
    with pytest.raises(ProblemsError, match=r"config\.value"):
        load_config(RegenerateConfig, None, overrides)


def test_a_value_in_place_of_a_section_is_named_without_our_class_names() -> None:
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, ["dataset=x", "output=y", "output_indices=[1]", "cache=/nvme/cache"])
    (problem,) = caught.value.problems
    assert "cache is '/nvme/cache', expected a section of keys" in problem.message
    assert "cache.KEY=VALUE" in problem.fix


def test_a_section_that_is_unknown_is_named_where_its_keys_were_given(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("dataset: d\noutput: o\noutput_indices: [1]\n", encoding="utf-8")
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, path, ["cash.folder=c"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.kind) == ("command line", "config.unknown_key")


def test_keys_of_a_section_that_do_not_go_together_are_named_without_the_rest_of_it() -> None:
    given = ["dataset=x", "output=y", "output_indices=[1]", "optim.learning_rate=0.002", "optim.muon_momentum=0.5"]
    with pytest.raises(ProblemsError) as caught:
        load_config(TrainConfig, None, given)
    (problem,) = caught.value.problems
    assert problem.message == "optim.muon_momentum=0.5: optim.name=adamw does not read that; pass optim.name=muon too"


def test_depths_of_evaluations_are_bounded() -> None:
    with pytest.raises(ProblemsError, match="eval_depths is 100000000"):
        load_config(TrainConfig, None, ["dataset=x", "output=y", "output_indices=[1]", "eval_depths=100000000"])


def test_what_only_a_data_set_has_is_refused_of_a_file() -> None:
    given = ["target.path=t", "output=o", "data.path=d.jsonl", "data.subset=en", "data.revision=main"]
    with pytest.raises(ProblemsError, match=r"data\.subset=en and data\.revision=main without data\.split"):
        load_config(RegenerateConfig, None, given)

"""The command of each release, and what is refused before a server is started."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.launch import build_command
from eagle3.serve.launch.nccl import PRESETS
from tests.unit.serve.launch.cases import launch_config, refused
from tests.unit.serve.launch.fakes import VERSION

Models = tuple[Path, Path]


def value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_command_says_what_the_config_says(models: Models) -> None:
    target, draft = models
    cfg = launch_config(
        target, draft, steps=2, tp=2, dtype="bfloat16", quantization="fp8", memory_fraction=0.8, context_length=4096,
        max_running_requests=16, attention_backend="triton", cuda_graph_max_batch=8, prefill_cuda_graphs=False,
        nccl_port=31000, port=31001, trust_remote_code=True, python="/opt/py", extra_args=["--random-seed", "1"],
    )  # fmt: skip

    command = build_command(cfg)

    assert command.argv[:3] == ("/opt/py", "-m", "sglang.launch_server")
    assert value(command.argv, "--model-path") == str(target)
    assert value(command.argv, "--speculative-draft-model-path") == str(draft)
    expected = {
        "--tp-size": "2", "--dtype": "bfloat16", "--quantization": "fp8", "--mem-fraction-static": "0.8",
        "--context-length": "4096", "--max-running-requests": "16", "--attention-backend": "triton",
        "--cuda-graph-max-bs-decode": "8", "--nccl-port": "31000", "--port": "31001", "--host": "127.0.0.1",
        "--speculative-algorithm": "EAGLE3", "--speculative-num-steps": "2", "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3", "--speculative-draft-model-quantization": "unquant",
        "--random-seed": "1",
    }  # fmt: skip
    assert {flag: value(command.argv, flag) for flag in expected} == expected
    assert {"--trust-remote-code", "--disable-prefill-cuda-graph", "--enable-metrics"} <= set(command.argv)
    assert command.argv[-2:] == ("--random-seed", "1")
    assert command.url == "http://127.0.0.1:31001"
    assert command.env == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    assert any(note.startswith("wiring check: SGLang 0.5.23") for note in command.notes)


def test_the_shell_line_is_the_command(models: Models, tmp_path: Path) -> None:
    strange = tmp_path / "a target's folder; $HOME"
    shutil.copytree(models[0], strange)
    command = build_command(launch_config(strange, None, steps=0, env={"A": "b c"}))

    words = shlex.split(str(command))

    assert words[:2] == ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0", "A=b c"]
    assert tuple(words[2:]) == command.argv
    assert json.loads(command.render(as_json=True))["shell"] == str(command)


def test_without_steps_the_target_is_served_alone(models: Models) -> None:
    command = build_command(launch_config(models[0], None, steps=0))

    assert not command.has_drafter
    assert not any("speculative" in argument for argument in command.argv)


@pytest.mark.parametrize(
    ("version", "largest", "no_prefill"),
    [
        ("0.5.12.post1", "--cuda-graph-max-bs", "--disable-piecewise-cuda-graph"),
        ("0.5.13.post1", "--cuda-graph-max-bs", "--disable-piecewise-cuda-graph"),
        ("0.5.14", "--cuda-graph-max-bs-decode", "--disable-prefill-cuda-graph"),
        ("0.5.16", "--cuda-graph-max-bs-decode", "--disable-prefill-cuda-graph"),
        ("0.5.23", "--cuda-graph-max-bs-decode", "--disable-prefill-cuda-graph"),
    ],
)
def test_each_release_gets_its_own_names(models: Models, version: str, largest: str, no_prefill: str) -> None:
    cfg = launch_config(
        models[0], None, steps=0, engine_version=version, cuda_graph_max_batch=8, prefill_cuda_graphs=False
    )

    argv = build_command(cfg).argv

    assert value(argv, largest) == "8"
    assert [flag for flag in argv if flag.startswith("--disable")] == [no_prefill]


def test_a_release_without_graphs_of_prefill_gets_no_switch_for_them(models: Models) -> None:
    cfg = launch_config(models[0], None, steps=0, engine_version="0.5.9", prefill_cuda_graphs=False)

    assert not any("disable" in argument for argument in build_command(cfg).argv)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.24", "0.6"])
def test_a_release_whose_arguments_nobody_read_is_refused(models: Models, version: str) -> None:
    assert refused(launch_config(models[0], None, steps=0, engine_version=version)) == ["launch.version_unknown"]


def test_the_version_that_the_drafter_was_exported_for_is_the_default(models: Models) -> None:
    command = build_command(launch_config(*models, engine_version=None))

    assert command.version == VERSION
    assert "exported for it" in command.notes[0]


def test_the_wiring_check_comes_first_and_its_refusal_ends_it(models: Models, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(models[1], draft)
    config = json.loads((draft / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3, 7]
    (draft / "config.json").write_text(json.dumps(config))

    with pytest.raises(ProblemsError) as caught:
        build_command(launch_config(models[0], draft, tp=3))
    kinds = [problem.kind for problem in caught.value.problems]
    assert kinds.count("launch.tp") == 2, "what else is wrong is said too"
    assert "wiring.one_early" in kinds

    ignored = [kind for kind in kinds if kind != "launch.tp"]
    command = build_command(launch_config(models[0], draft, ignore_problems=ignored))
    assert any("ignored as asked: [wiring.one_early]" in note for note in command.notes)


def test_graphs_that_ignore_the_layer_ids_are_refused(models: Models) -> None:
    """SGLang up to 0.5.10.post1: its CUDA graphs verify with the default layers."""
    old = {"engine_version": "0.5.10.post1"}
    with_graphs = launch_config(*models, **old)
    assert "wiring.cuda_graphs" in refused(with_graphs)

    command = build_command(launch_config(*models, **old, cuda_graphs=False))
    assert "--disable-cuda-graph" in command.argv and not command.cuda_graphs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"context_length": 9000}, ["launch.context", "launch.context"]),
        ({"tp": 3}, ["launch.tp", "launch.tp"]),
        ({"nccl": ["pcie", "no_p2p"]}, ["launch.nccl"]),
        ({"attention_backend": "trtllm_mha", "topk": 2, "draft_tokens": 6}, ["launch.unsupported"]),
        ({"checkpoint": "/nowhere"}, ["checkpoint.not_a_checkpoint"]),
    ],
)
def test_what_would_fail_after_loading_is_refused_before(
    models: Models, values: dict[str, object], expected: list[str]
) -> None:
    assert refused(launch_config(*models, **values)) == expected


def test_a_drafter_shorter_than_the_target_is_refused_or_taken_knowingly(models: Models, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(models[1], draft)
    config = json.loads((draft / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    config["eagle3"].pop("context_length")
    (draft / "config.json").write_text(json.dumps(config))

    with pytest.raises(ProblemsError) as caught:
        build_command(launch_config(models[0], draft))
    (problem,) = caught.value.problems
    assert problem.kind == "launch.context"
    assert "8192 tokens are to be served, the drafter's own limit is 2048" in problem.message

    knowingly = build_command(launch_config(models[0], draft, allow_longer_context=True))
    assert knowingly.env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    shorter = build_command(launch_config(models[0], draft, context_length=2048))
    assert value(shorter.argv, "--context-length") == "2048"
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in shorter.env


def test_a_recorded_context_is_served(models: Models, tmp_path: Path) -> None:
    """Without the argument, SGLang would serve the target's and refuse the drafter."""
    draft = tmp_path / "draft"
    shutil.copytree(models[1], draft)
    config = json.loads((draft / "config.json").read_text())
    config["max_position_embeddings"] = config["eagle3"]["context_length"] = 2048
    (draft / "config.json").write_text(json.dumps(config))

    assert value(build_command(launch_config(models[0], draft)).argv, "--context-length") == "2048"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 3, "draft_tokens": 6}, "steps + 1 = 4"),
        ({"steps": 2, "topk": 4}, "give draft_tokens"),
        ({"steps": 2, "topk": 4, "draft_tokens": 2}, "cannot hold a path"),
        ({"steps": 2, "topk": 4, "draft_tokens": 22}, "at most 21"),
        ({"steps": 0, "topk": 2}, "leave topk and draft_tokens out"),
        ({"nccl": ["debug", "debug"]}, "given twice"),
    ],
)
def test_step_counts_that_cannot_be_are_named(models: Models, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        launch_config(*models, **wrong)


def test_a_drafter_is_required(models: Models) -> None:
    with pytest.raises(ValueError, match="checkpoint is not given"):
        launch_config(models[0], None)


@pytest.mark.parametrize(
    ("gone", "said"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_a_target_that_lacks_pieces_is_named(models: Models, tmp_path: Path, gone: str, said: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(models[0], target)
    (target / gone).unlink()

    with pytest.raises(ProblemsError, match=said):
        build_command(launch_config(target, None, steps=0))


def test_a_target_that_lacks_shards_of_its_index_is_named(models: Models, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(models[0], target)
    shards = {f"layer.{number}": f"model-{number:05}-of-00008.safetensors" for number in range(8)}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in list(shards.values())[:6]:
        (target / name).touch()

    with pytest.raises(ProblemsError, match=r"lacks 2 of 8 shards of its index: model-00006-of-00008\.safetensors, "):
        build_command(launch_config(target, None, steps=0))


def test_a_target_on_another_machine_is_told_by_its_name(models: Models) -> None:
    cfg = launch_config(Path("/models/elsewhere"), None, steps=0)

    assert any("not on this machine" in note for note in build_command(cfg).notes)


def test_presets_set_what_they_say(models: Models) -> None:
    cfg = launch_config(models[0], None, steps=0, nccl=["pcie_latency", "one_host"], env={"NCCL_PROTO": "LL128"})

    env = build_command(cfg).env

    assert env["NCCL_P2P_LEVEL"] == "SYS" and env["NCCL_IB_DISABLE"] == "1"
    assert env["NCCL_PROTO"] == "LL128", "what the user says himself wins"
    documented = (Path(__file__).parents[4] / "docs" / "serving.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        assert f"`{name}`" in documented
        assert all(f"`{key}={set_to}`" in documented for key, set_to in preset.env.items())


def test_vllm_gets_its_own_words(models: Models) -> None:
    cfg = launch_config(
        *models, engine="vllm", engine_version="0.33.0", steps=2, tp=2, memory_fraction=0.9, cuda_graphs=False
    )

    argv = build_command(cfg).argv

    assert argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", str(models[0]))
    drafter = {"method": "eagle3", "model": str(models[1]), "num_speculative_tokens": 2}
    assert json.loads(value(argv, "--speculative-config")) == drafter
    assert value(argv, "--tensor-parallel-size") == "2" and value(argv, "--gpu-memory-utilization") == "0.9"
    assert "--enforce-eager" in argv and "--enable-metrics" not in argv


def test_what_vllm_has_no_word_for_is_refused(models: Models) -> None:
    cfg = launch_config(*models, engine="vllm", engine_version="0.33", topk=2, draft_tokens=6, nccl_port=3)

    assert refused(cfg) == ["launch.unsupported"] * 2
    assert "launch.version_unknown" in refused(launch_config(*models, engine="vllm", engine_version="0.32"))

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from eagle3.train.engine import (
    _DEEPSPEED,
    _FSDP,
    check_accelerator,
    check_active,
    check_environment,
    check_launcher,
    read_launcher,
)

ROOT = Path(__file__).parents[3]

LAUNCH = ["python", "/usr/bin/accelerate", "launch"]
FSDP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config: {}\n"


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron"),
    ],
)
def test_an_engine_that_does_not_run_on_a_cpu_is_refused(variable: str, name: str) -> None:
    problems = check_environment({variable: "true"}, "no", gpu=False)
    assert [problem.kind for problem in problems] == ["train.engine"]
    assert name in problems[0].message


def launched(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which `accelerate launch` starts processes with a shipped config."""
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    config = str(ROOT / f"configs/accelerate/{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", config, "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    if not arguments.use_deepspeed:
        return {**prepare_multi_gpu_env(arguments), "WORLD_SIZE": "2"}
    arguments.deepspeed_fields_from_accelerate_config = ""
    return {**prepare_deepspeed_cmd_env(arguments)[1], "WORLD_SIZE": "2"}


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_the_shipped_configs_that_shard_run_on_gpus_and_nothing_else_may_be_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = launched(name, monkeypatch)
    assert check_environment(environment, "bf16", gpu=True, deepspeed=True) == []
    settings = _FSDP if name == "fsdp2" else _DEEPSPEED
    assert {variable for variable in settings.keys() & environment.keys() if "OFFLOAD" in variable}
    for variable, (_, key) in settings.items():
        problems = check_environment({**environment, variable: "other"}, "no", gpu=True, deepspeed=True)
        assert [(problem.kind, key in problem.message) for problem in problems] == [("train.engine", True)]
    command = [*LAUNCH, "--config_file", str(ROOT / f"configs/accelerate/{name}.yaml"), "train.py"]
    assert check_launcher(read_launcher(command), environment) == []
    (dropped,) = check_launcher(read_launcher(command), {"WORLD_SIZE": "2"})
    assert "needs GPUs" in dropped.message
    if name != "fsdp2":
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[-1]


def test_fsdp1_and_other_stages_and_a_missing_deepspeed_are_refused_by_name() -> None:
    (problem,) = check_environment({"ACCELERATE_USE_FSDP": "true"}, "no", gpu=True)
    assert "fsdp_version is 1, expected 2" in problem.message
    asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    messages = [problem.message for problem in check_environment(asked, "no", gpu=True, deepspeed=False)]
    for part, message in zip(("zero_stage is 1", "not installed", "no launcher"), messages, strict=True):
        assert part in message


def accelerator_of(kind: DistributedType) -> Accelerator:
    return SimpleNamespace(distributed_type=kind, num_processes=2)  # type: ignore[return-value]


def test_an_engine_other_than_the_one_asked_for_is_refused() -> None:
    asked = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}
    assert check_accelerator(accelerator_of(DistributedType.FSDP), asked) == []
    for kind, environment in (
        (DistributedType.MULTI_CPU, asked),
        (DistributedType.DEEPSPEED, asked),
        (DistributedType.FSDP, {"WORLD_SIZE": "2"}),
        (DistributedType.MEGATRON_LM, {"WORLD_SIZE": "2"}),
    ):
        assert [problem.kind for problem in check_accelerator(accelerator_of(kind), environment)] == ["train.engine"]


def test_an_engine_that_is_not_what_it_was_to_be_is_refused() -> None:
    for active, kinds in (("fsdp2", []), ("ddp", ["train.engine"])):
        engine = SimpleNamespace(name="fsdp2", active=lambda active=active: active)
        assert [problem.kind for problem in check_active(engine)] == kinds  # type: ignore[arg-type]


def test_plain_environment_has_no_problem() -> None:
    assert check_environment({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, "bf16") == []


def test_every_conflict_is_listed() -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    assert [problem.kind for problem in check_environment(environment, "bf16")] == ["train.engine", "train.precision"]


def test_an_engine_named_in_the_config_file_and_dropped_on_cpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    command = [*LAUNCH, "--cpu", "--config_file", str(tmp_path / "fsdp.yaml"), "train.py", "--config", "x.yaml"]
    problems = check_launcher(read_launcher(command), {})
    assert [problem.kind for problem in problems] == ["train.engine", "train.processes"]
    assert "FSDP" in problems[0].message and "needs GPUs" in problems[0].message
    assert "2 processes were asked for and Accelerate started 1" in problems[1].message


def test_processes_dropped_on_cpu_are_refused() -> None:
    request = read_launcher([*LAUNCH, "--cpu", "--num_processes", "2", "train.py"])
    assert [problem.kind for problem in check_launcher(request, {})] == ["train.processes"]
    assert check_launcher(request, {"WORLD_SIZE": "2"}) == []


def test_every_way_to_start_the_launcher_is_read() -> None:
    for start in (["accelerate-launch"], ["python", "-m", "accelerate.commands.launch"], LAUNCH[1:], LAUNCH):
        request = read_launcher([*start, "--cpu", "--num_processes", "3", "train.py", "--num_processes", "9"])
        assert request is not None
        assert request.num_processes == 3


def test_other_parents_ask_for_nothing() -> None:
    for command in ([], ["bash"], ["python", "-m", "pytest", "tests"], ["torchrun", "--nproc_per_node", "2", "a.py"]):
        assert read_launcher(command) is None
    assert check_launcher(None, {}) == []


@pytest.mark.parametrize(("name", "processes"), [("single", 1), ("ddp", 2)])
def test_the_shipped_configs_are_run(name: str, processes: int) -> None:
    command = [*LAUNCH, "--config_file", str(ROOT / f"configs/accelerate/{name}.yaml"), "train.py"]
    assert check_launcher(read_launcher(command), {"WORLD_SIZE": str(processes)}) == []
    assert check_launcher(read_launcher(command), {"WORLD_SIZE": "3"}) != []

from pathlib import Path

import pytest

from eagle3.train.engine import check_environment, check_launcher, read_launcher

LAUNCH = ["python", "/usr/bin/accelerate", "launch"]
FSDP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config: {}\n"


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron"),
    ],
)
def test_an_engine_that_accelerate_was_told_to_use_is_refused(variable: str, name: str) -> None:
    problems = check_environment({variable: "true"}, "no")
    assert [problem.kind for problem in problems] == ["train.engine"]
    assert name in problems[0].message


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
    assert "FSDP" in problems[0].message
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
    command = [*LAUNCH, "--config_file", str(Path(__file__).parents[3] / f"configs/accelerate/{name}.yaml"), "train.py"]
    assert check_launcher(read_launcher(command), {"WORLD_SIZE": str(processes)}) == []
    assert check_launcher(read_launcher(command), {"WORLD_SIZE": "3"}) != []

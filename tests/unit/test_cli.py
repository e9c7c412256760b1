"""The command line: exit codes, one clear message for bad input, help from the configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from eagle3.cli import main
from eagle3.config import ExtractConfig
from tests.disks import small_disk
from tests.unit.wiring.foreign import SPECFORGE, llama_tensors, write_foreign, write_target


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(args)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    "args",
    [
        ("frobnicate",),
        ("train", "--nope"),
        ("train", "dataset=d"),
        ("train", "--config", "/nowhere.yaml"),
        ("export", "--run", "/nowhere", "--output", "/tmp/never-written"),
        ("evaluate", "--checkpoint", "/nowhere", "--dataset", "/nowhere"),
        ("wiring", "check", "/nowhere"),
        ("wiring", "explain", "--target", "nobody", "--layers", "1"),
        ("wiring", "explain", "--target", "kimi-k2.5", "--layers", "2,x"),
        ("wiring", "explain", "--target", "kimi-k2.5", "--layers", "58,30,2"),
        ("data", "verify", "/nowhere"),
        ("data", "verify", "/nowhere", "--workers", "0"),
        ("data", "repair", "/nowhere", "--yes"),
        ("data", "inspect", "/nowhere"),
        ("data", "merge", "/tmp/never-written", "/nowhere"),
        ("data", "merge", "/tmp/never-written", "/nowhere", "/nowhere"),
        ("data", "split", "/nowhere", "/tmp/never-written", "--parts", "2"),
        ("data", "estimate", "--config", "/nowhere.yaml"),
        ("data", "import"),
        ("data", "import", "--config", "/nowhere.yaml"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *args)

    assert code == 2
    assert out + err
    assert "Traceback" not in out + err


def test_explain_names_the_ids_of_both_sides_of_the_kimi_change(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "wiring", "explain", "--target", "kimi-k2.5", "--layers", "2,30,58")

    assert code == 0
    assert "0.5.10 to 0.5.12.post1" in out and "0.5.13" in out
    assert "[2, 30, 58]" in out and "[3, 31, 59]" in out


def test_check_as_json_is_one_json_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "wiring", "check", str(tmp_path), "--json")

    assert code == 2
    assert json.loads(out)["problems"][0]["kind"] == "checkpoint.not_a_checkpoint"


@pytest.mark.parametrize(("command", "key"), [("train", "ttt.chain_rule"), ("extract", "output_indices")])
def test_help_lists_the_config_keys(capsys: pytest.CaptureFixture[str], command: str, key: str) -> None:
    code, out, _ = run(capsys, command, "--help")

    assert code == 0
    assert key in out


@pytest.mark.parametrize(("given", "dtype"), [("fp8", "float8_e4m3fn"), ("bf16", "bfloat16"), (None, "float16")])
def test_dtype_is_the_type_of_the_store(monkeypatch: pytest.MonkeyPatch, given: str | None, dtype: str) -> None:
    seen: list[ExtractConfig] = []
    monkeypatch.setattr("eagle3.target.extract.run_extract", lambda cfg: seen.append(cfg) or ExtractReportStub())
    values = ["target.path=t", "data.path=d", "output=o", "output_indices=[1]", "store_dtype=float16"]
    with pytest.raises(SystemExit) as stop:
        main(["extract", *values, *([] if given is None else ["--dtype", given])])
    assert not stop.value.code and seen[0].store_dtype == dtype


class ExtractReportStub:
    def render(self) -> str:
        return ""


@pytest.mark.parametrize("command", ["export", "evaluate", "verify", "explain"])
def test_a_name_that_the_file_system_refuses_is_a_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    name = str(tmp_path / ("a" * 300))
    args = {
        "export": ("export", "--run", "/nowhere", "--output", name),
        "evaluate": ("evaluate", "--checkpoint", name, "--dataset", "/nowhere"),
        "verify": ("data", "verify", name),
        "explain": ("wiring", "explain", "--target", name, "--layers", "1"),
    }
    code, out, err = run(capsys, *args[command])
    assert code == 2
    assert "File name too long" in out + err


def test_tiny_kimi_overwrites_nothing_but_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "tiny-kimi", "--output", str(tmp_path))[0] == 0
    assert run(capsys, "tiny-kimi", "--output", str(tmp_path))[0] == 0
    (tmp_path / "prompts.jsonl").write_text("mine")
    (tmp_path / "target" / "config.json").write_text("{}")
    code, _, err = run(capsys, "tiny-kimi", "--output", str(tmp_path))
    assert (code, err.count("tiny.output")) == (2, 2)
    assert (tmp_path / "prompts.jsonl").read_text() == "mine"
    assert (tmp_path / "target" / "config.json").read_text() == "{}"


def test_check_takes_the_layers_of_another_tools_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = str(write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors()))
    check = ("wiring", "check", checkpoint, "--target", str(write_target(tmp_path / "target")))

    code, out, _ = run(capsys, *check, "--layers", "1,29,57")
    assert (code, "SGLang 0.5.23 (the newest known) reads the outputs of layers 1, 29, 57" in out) == (0, True)
    code, out, _ = run(capsys, *check, "--layers", "2,30,58")
    assert (code, "wiring.one_early" in out) == (2, True)
    code, out, _ = run(capsys, *check)
    assert (code, "checkpoint.no_contract" in out) == (2, True)
    code, out, err = run(capsys, *check, "--layers", "two")
    assert (code, "layers.type" in out + err) == (2, True)


def test_explain_shows_its_sources_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    explain = ("wiring", "explain", "--target", "kimi-k2.5", "--layers", "2,30,58")

    assert "set_eagle3_layers_to_capture on 20" in run(capsys, *explain, "--sources")[1]
    assert "read in" not in run(capsys, *explain)[1]


def test_tiny_kimi_on_a_full_disk_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with small_disk(tmp_path, "256k"):
        code, _, err = run(capsys, "tiny-kimi", "--output", str(tmp_path))
        assert (code, list(tmp_path.iterdir())) == (2, [])
        assert "disk.full" in err


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("layers.type", ("check", "/nowhere", "--layers", "two")),
        ("target.unknown", ("explain", "--target", "nobody", "--layers", "2")),
        ("probe.what", ("probe", "/nowhere")),
        ("file.missing", ("probe", "/nowhere", "--target", "/nowhere")),
        ("file.missing", ("probe", "/nowhere", "--server", "http://localhost:1")),
    ],
)
def test_what_a_command_stops_at_is_json_too(
    capsys: pytest.CaptureFixture[str], kind: str, args: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, "wiring", *args, "--json")

    assert code == 2
    schema = Path(__file__).parents[2] / "docs/schemas/problems.schema.json"
    jsonschema.validate(json.loads(out), json.loads(schema.read_text(encoding="utf-8")))
    assert json.loads(out)["problems"][0]["kind"] == kind


@pytest.mark.parametrize("grouped", [False, True])
def test_an_error_beside_an_open_process_group_ends_with_its_code_at_once(tmp_path: Path, grouped: bool) -> None:
    """An interpreter that ends in order may abort in a thread of the group."""
    group = f"distributed.init_process_group('gloo', init_method='file://{tmp_path / 'group'}', rank=0, world_size=1)"
    code = (
        "import atexit\nfrom torch import distributed\nfrom eagle3.cli import main\n"
        f"atexit.register(print, 'in order')\n{group if grouped else ''}\n"
        "main(['train', '--config', 'nowhere.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "nowhere.yaml" in done.stderr
    assert ("in order" in done.stdout) is not grouped

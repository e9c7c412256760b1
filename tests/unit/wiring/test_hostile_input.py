"""Whatever stands in the files that are checked: problems with a name, soon; never a traceback, a hang or a crash."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring import check_checkpoint, check_dataset, describe_checkpoint, explain, render_json, render_text
from eagle3.wiring.fingerprint_file import load_fingerprint
from tests.unit.wiring.cases import CONTEXT, VOCAB, kinds, make_contract, make_tensors, write_checkpoint, write_store
from tests.unit.wiring.foreign import MLA, SPECFORGE, SPECULATORS, llama_tensors, write_foreign, write_target

GOLDEN = Path(__file__).parents[2] / "golden/hidden_state_store_v1"
HUGE, BEYOND = 10**30, 10**400
JUNK = [None, True, 0, -1, 1.5, HUGE, BEYOND, 2**31 - 1, 1e308, "", "x", "\ud800", "a\0b", [], {}, [HUGE], {"a": {}}]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8}
OPTIONS = {"fc_norm": True, "norm_before_fc": True, "num_aux_hidden_states": 3, "target_hidden_size": 8}


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a JSON value, of lists the first two items only."""
    keys = value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield (*prefix, key)
        yield from paths(value[key], (*prefix, key))


def spoiled(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with junk in each place in turn."""
    for path in paths(value):
        for junk in JUNK:
            changed = at = copy.deepcopy(value)
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = junk
            yield f"{path} = {str(junk)[:40]!r}", changed


def is_sound(call: Callable[[], Any], about: str) -> None:
    """The call gives a value, problems, or raises problems; all of them in words, of a kind, with a fix."""
    try:
        found = call()
    except ProblemsError as error:
        found = list(error.problems)
    except Exception as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {error}") from error
    problems = [item for item in found if isinstance(item, Problem)] if isinstance(found, list) else []
    assert all(problem.message and problem.fix and "." in problem.kind for problem in problems), about
    render_text(problems)
    json.loads(render_json(problems))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("extra", [{}, {"rope_scaling": LLAMA3, **OPTIONS}], ids=["plain", "options"])
def test_any_value_anywhere_in_an_own_config(tmp_path: Path, extra: dict[str, Any]) -> None:
    checkpoint, store = write_checkpoint(tmp_path / "draft"), write_store(tmp_path / "store", make_contract())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")) | extra

    for about, value in spoiled(config):
        write(checkpoint / "config.json", value)
        is_sound(lambda: check_checkpoint(checkpoint), about)
        is_sound(lambda: check_checkpoint(checkpoint, engine="vllm", dataset=store), about)
        is_sound(lambda: describe_checkpoint(checkpoint), about)


@pytest.mark.parametrize("config", [SPECFORGE, SPECULATORS, MLA], ids=["specforge", "speculators", "mla"])
def test_any_value_anywhere_in_another_tools_config(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint = write_foreign(tmp_path / "draft", config, llama_tensors())

    for about, value in spoiled(config):
        write(checkpoint / "config.json", value)
        is_sound(lambda: check_checkpoint(checkpoint, target="kimi-k2.5", layers=[2, 30, 58]), about)


def test_any_value_anywhere_in_a_contract(tmp_path: Path) -> None:
    checkpoint, store = write_checkpoint(tmp_path / "draft"), write_store(tmp_path / "store", make_contract())
    target = write_target(tmp_path / "target")

    for about, value in spoiled(make_contract().to_dict()):
        write(checkpoint / "eagle3_contract.json", value)
        is_sound(lambda: check_checkpoint(checkpoint, dataset=store, target=target, layers=[2, 30, 58]), about)


@pytest.mark.parametrize("nested", [False, True])
def test_any_value_anywhere_in_a_targets_config(tmp_path: Path, nested: bool) -> None:
    checkpoint, target = write_checkpoint(tmp_path / "draft"), write_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_scaling": {"type": "yarn", "factor": 64.0}}
    for about, value in spoiled({"model_type": "kimi_k25", "text_config": config} if nested else config):
        write(target / "config.json", value)
        is_sound(lambda: check_checkpoint(checkpoint, target=target), about)
        is_sound(lambda: explain(target, "2,30,58"), about)


def test_any_value_anywhere_in_a_manifest_and_its_fingerprint(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(GOLDEN, store)
    manifest = json.loads((store / "manifest.json").read_text(encoding="utf-8"))
    assert check_dataset(store) == []

    for about, value in spoiled(manifest):
        write(store / "manifest.json", value)
        is_sound(lambda: check_dataset(store), about)
        is_sound(lambda: load_fingerprint(store), about)


def test_an_impossible_number_of_tokens_places_no_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store")
    manifest = json.loads((tmp_path / "store/manifest.json").read_text(encoding="utf-8"))
    for tokens in (0, -1, 1.5, "3", None, True):
        for shard in manifest["shards"]:
            shard["samples"][0]["tokens"] = tokens
        write(tmp_path / "store/manifest.json", manifest)
        assert kinds(check_dataset(tmp_path / "store")) == ["fingerprint.sample"], tokens


@pytest.mark.parametrize("size", [HUGE, 2**31])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "head_dim"])
def test_a_size_that_no_model_has_is_named(tmp_path: Path, key: str, size: int) -> None:
    checkpoint = write_checkpoint(tmp_path, config={key: size})

    assert kinds(check_checkpoint(checkpoint)) == ["config.size"]


def test_the_largest_sizes_that_are_taken_cost_no_memory(tmp_path: Path) -> None:
    """Whatever config.json claims: lists as long as that are only made of what a file holds."""
    tensors = {name: value for name, value in llama_tensors().items() if name not in ("d2t", "t2d")}
    sizes = {"vocab_size": 2**31 - 1, "draft_vocab_size": 2**31 - 1}
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE | sizes, tensors)
    found = check_checkpoint(checkpoint, target="kimi-k2.5", layers=[2, 30, 58])
    assert {"tensor.shape", "target.vocab_size"} <= set(kinds(found))

    write(checkpoint / "config.json", SPECFORGE | {"fc_norm": True, "num_aux_hidden_states": 1001})
    assert "from 1 to 1000" in str(check_checkpoint(checkpoint, target="kimi-k2.5", layers=[2, 30, 58]))
    write(checkpoint / "config.json", SPECFORGE | {"fc_norm": True, "num_aux_hidden_states": 1000})
    assert "config.size" not in kinds(check_checkpoint(checkpoint, target="kimi-k2.5", layers=[2, 30, 58]))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "value",
    [{"rope_type": {}}, {"type": ["yarn"]}, {"factor": 0}, {"factor": -1.0}, {"factor": "2"}, {"factor": 1e9}, [], "x"],
)
def test_a_rope_that_cannot_be_is_named(tmp_path: Path, key: str, value: Any) -> None:
    checkpoint = write_checkpoint(tmp_path, config={key: value})

    assert kinds(check_checkpoint(checkpoint)) == [f"config.{key}"]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_can_be_is_none(tmp_path: Path, key: str) -> None:
    for value in (LLAMA3, {"type": "linear", "factor": 4}, {"rope_type": "yarn", "factor": 1_000_000}, {}):
        checkpoint = write_checkpoint(tmp_path, config={key: value | {"original_max_position_embeddings": CONTEXT}})
        assert check_checkpoint(checkpoint) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'{"a": NaN}', "NaN is no finite number"),
        (b'{"a": -Infinity}', "-Infinity is no finite number"),
        (b'{"a": 1e999}', "1e999 is no finite number"),
        (b'{"a": 1, "b": {"c": 2, "c": 3}}', "'c' is listed twice"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b"\x80\x04\x95", "utf-8"),
        (b"\0" * 64, "Expecting value"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "eagle3_contract.json", "eagle3_fingerprint.json"])
def test_json_that_readers_understand_differently_is_one_error(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / name).write_bytes(content)

    (problem,) = check_checkpoint(checkpoint)

    assert problem.kind == "file.not_json"
    assert why in problem.message


def test_a_pair_of_surrogates_is_a_letter(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, config={"comment": "\U0001f600"})

    assert "\\ud83d\\ude00" in (checkpoint / "config.json").read_text(encoding="utf-8")
    assert check_checkpoint(checkpoint) == []


def headed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (headed(b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', b"0000"), "safetensors.format"),
        (headed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [NaN, 4]}}'), "safetensors.format"),
        (headed(b'{"a": {}, "a": {}}'), "safetensors.format"),
        (headed(b'{"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (HUGE, HUGE)), "safetensors.entry"),
        (headed(b'{"a": {"dtype": "U8", "shape": [%s], "data_offsets": [0, 1]}}' % b",".join([b"9" * 4000] * 2_000)),
         "safetensors.entry"),
        (headed(b"[" * 200_000), "safetensors.format"),
        (headed("{}".encode("utf-16")), "safetensors.format"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "safetensors.format"),
        (struct.pack("<Q", 99_999_999) + b"{}", "safetensors.truncated"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_one_short_error(tmp_path: Path, content: bytes, kind: str) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").write_bytes(content)

    (problem,) = check_checkpoint(checkpoint)

    assert problem.kind == kind
    assert len(problem.message) < 1000


def test_a_header_of_very_many_unknown_tensors_is_checked_in_seconds(tmp_path: Path) -> None:
    empty = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    checkpoint = write_checkpoint(tmp_path)
    header = "{" + ", ".join(f'"layers.{n}": {empty}' for n in range(40_000)) + "}"
    (checkpoint / "model.safetensors").write_bytes(headed(header.encode()))

    assert kinds(check_checkpoint(checkpoint)).count("tensor.extra") == 40_000


NAMES = ("config.json", "eagle3_contract.json", "eagle3_fingerprint.json", "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["folder", "loop", "dangling", "pipe"])
def test_what_is_no_file_is_one_error(tmp_path: Path, name: str, what: str) -> None:
    checkpoint = write_checkpoint(tmp_path)
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "loop" else "absent")

    (problem,) = check_checkpoint(checkpoint)

    assert problem.kind in ("checkpoint.not_a_checkpoint", "file.missing", "file.unreadable")
    assert (name in problem.where) == (name != "config.json")


def test_what_the_file_system_refuses_is_a_problem_for_importers_too(tmp_path: Path) -> None:
    name = "a" * 300
    checkpoint = write_checkpoint(tmp_path / "draft")

    assert kinds(check_checkpoint(name)) == ["file.unreadable"]
    assert kinds(check_dataset(name)) == ["file.unreadable"]
    assert kinds(check_checkpoint(checkpoint, dataset=name)) == ["file.unreadable"]
    assert kinds(check_checkpoint(checkpoint, target=name)) == ["file.unreadable"]
    for call in (lambda: explain(name, "2"), lambda: describe_checkpoint(name)):
        with pytest.raises(ProblemsError, match=r"file\.unreadable"):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_may_not_be_read_is_a_problem(tmp_path: Path, name: str) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read everything")
    checkpoint = write_checkpoint(tmp_path / "draft")
    (checkpoint / name).touch()
    for file in checkpoint.iterdir():
        file.chmod(0 if file.name == name else 0o644)
    for folder in (checkpoint, *checkpoint.parents[: len(checkpoint.parts) - 2]):
        folder.chmod(0o755)
    script = f"from eagle3.wiring import check_checkpoint as c; print([p.kind for p in c({str(checkpoint)!r})])"
    user = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []

    done = subprocess.run([*user, sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("['file.unreadable']\n", "")


def test_a_name_that_no_terminal_can_show_is_shown_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eagle3.cli", "wiring", "check"]
    folder = os.fsencode(tmp_path) + b"/\xff\xf0\x9f\x98\x80"

    for options, encoding in ((["--json"], "utf-8"), ([], "ascii")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([*command, folder, *options], capture_output=True, check=False, env=environment)
        assert (done.returncode, done.stderr) == (2, b"")
        assert rb"\udcff" in done.stdout
        if options:
            assert json.loads(done.stdout)["problems"][0]["kind"] == "checkpoint.not_a_checkpoint"


def test_the_whole_vocab_is_still_the_drafts(tmp_path: Path) -> None:
    """The tables may be missing where the head has the whole vocab's size, and only there."""
    whole = {name: value for name, value in make_tensors(make_contract()).items() if name not in ("d2t", "t2d")}
    whole["lm_head.weight"] = whole["lm_head.weight"].repeat(VOCAB // 4, 1)
    config = SPECFORGE | {"draft_vocab_size": VOCAB}
    checkpoint = write_foreign(tmp_path / "draft", config, whole)

    target = write_target(tmp_path / "target")
    assert check_checkpoint(checkpoint, target=target, layers=[2, 30, 58], engine_version="0.5.12") == []

"""`eagle3 serve profile` splits the decode cycles of a real, running SGLang."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.serve.profile import profile_traces
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring import LayerWiring
from tests.serving.conftest import ServerStarter
from tests.serving.constructed import make_export, make_target
from tests.serving.sglang_venv import ROOT, SERVED_VERSION

WIRING = LayerWiring((0, 2, 4), 6)
STEPS, CYCLES = 3, 6
EAGLE = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", STEPS, "--speculative-eagle-topk", 1,
         "--speculative-num-draft-tokens", STEPS + 1)  # fmt: skip


@pytest.mark.timeout(400)
def test_the_parts_of_a_real_cycle_add_up_by_ranges_and_by_frames_alike(server: ServerStarter, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", make_tiny_llama, WIRING, hidden_size=128)
    draft = make_export(tmp_path / "export", target, WIRING, SERVED_VERSION)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi there"}\n{"prompt": "What is it?"}\n', encoding="utf-8")
    url = server("--model-path", target, "--dtype", "float32", *map(str, EAGLE),
                 "--speculative-draft-model-path", draft)  # fmt: skip

    args = ["serve", "profile", "--server", url, "--prompts", str(prompts), "--output", str(tmp_path / "traces"),
            "--cycles", str(CYCLES), "--requests", "1", "--max-new-tokens", "24", "--with-stack", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, args)

    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    schema = json.loads((ROOT / "docs/schemas/profile.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(value, schema)
    assert value["server"]["version"] == SERVED_VERSION and value["server"]["steps"] == STEPS
    assert value["method"] == "ranges" and value["on_gpu"] is False and value["batch"] == 1
    assert value["cycles"]["used"] >= CYCLES // 2
    means = {part["name"]: part["ms"]["mean"] for part in value["parts"]}
    assert sum(means.values()) == pytest.approx(value["cycle_ms"]["mean"])
    assert means["verify"] > means["draft"] > means["sampling"] > 0 and means["draft_extend"] > 0
    assert means["unattributed"] == 0
    measured = value["untraced"]
    assert 1 <= measured["acceptance_length"] <= STEPS + 1 and measured["cycle_ms"] > 0
    assert value["point"]["acceptance_length"] == pytest.approx(measured["acceptance_length"], abs=1e-5)

    [trace] = [Path(rank["trace"]) for rank in value["ranks"]]
    events = json.loads(gzip.decompress(trace.read_bytes()))
    events["traceEvents"] = [item for item in events["traceEvents"] if item.get("cat") != "user_annotation"]
    (tmp_path / "frames.json").write_text(json.dumps(events), encoding="utf-8")
    [by_frames] = profile_traces([tmp_path / "frames.json"]).splits
    assert by_frames.method == "stack"
    assert by_frames.cycle.mean == pytest.approx(value["cycle_ms"]["mean"], rel=0.05)
    for part in ("draft", "verify", "draft_extend"):
        assert by_frames.parts[part].mean == pytest.approx(means[part], rel=0.1), part

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import pytest

from eagle3.errors import Problem
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Measured, Shift, Verdict, allowed_error, coarser, diagnose
from eagle3.wiring.probe_report import SENTENCES, ProbeReport

DOCS = Path(__file__).parents[3] / "docs"
FIXES = defaultdict(lambda: "do this")
LAYERS = 61


def slot(
    name: str, expected: Boundary, errors: Mapping[Boundary, float], sample: str = "a", **values: object
) -> Measured:
    rows = dict.fromkeys(range(8), errors[expected])
    fields = {"row_errors": rows, "shift": None, "precision": "bfloat16", **values}
    return Measured(sample=sample, slot=name, expected=expected, errors=errors, **fields)  # type: ignore[arg-type]


def report(*verdicts: Verdict, **values: object) -> ProbeReport:
    return ProbeReport("store", verdicts, LAYERS, FIXES, **values)  # type: ignore[arg-type]


def early(sample: str) -> list[Measured]:
    return [
        slot("slot 0", 3, {2: 0.0, 3: 0.16, 4: 0.2}, sample),
        slot("slot 1", 31, {30: 0.001, 31: 0.2, 32: 0.3}, sample),
        slot("last", POST_NORM, {61: 0.9, POST_NORM: 0.0}, sample),
    ]


def test_slots_and_samples_of_one_cause_are_one_problem_in_words() -> None:
    found = report(*diagnose([early("a"), early("b")], allowed_error("bfloat16", "float32")))

    [problem] = found.problems
    assert problem.kind == "probe.one_early"
    assert problem.where == "store" and problem.fix == "do this"
    assert problem.message == (
        "slot 0 and slot 1 hold the outputs of layers 1, 29, expected the outputs of layers 2, 30: one layer early "
        "(error 0.05%, 18.00% for the next closest; in 2 of 2 samples: a, b)"
    )


def test_the_table_has_a_line_for_each_slot_and_verdict() -> None:
    lines = report(*diagnose([early("a"), early("b")], 0.01)).render().splitlines()

    assert lines[3].split() == ["slot", "expected", "holds", "error", "next", "type", "samples", "verdict"]
    assert "slot 0  layer 2    layer 1    0.00%  16.00%  bfloat16  2        one early" in lines
    assert "last    post-norm  post-norm  0.00%  90.00%  bfloat16  2        right" in lines


def test_a_right_store_says_so() -> None:
    found = report(*diagnose([early("a")[2:]], 0.01), notes=["note: something"])

    assert found.problems == []
    assert found.render().splitlines()[0] == "store: every slot is right"
    assert found.render().splitlines()[-1] == "note: something"


@pytest.mark.parametrize(
    ("measured", "cause", "text"),
    [
        (
            slot("slot 0", 3, {0: 0.0, 2: 1.0, 3: 1.0}),
            "embedding",
            "slot 0 holds the embedding, expected the output of",
        ),
        (slot("slot 0", 3, {3: 0.5, 4: 0.0}), "one_late", "slot 0 holds the output of layer 3, expected the output of"),
        (slot("slot 0", 3, {2: 0.5, 3: 0.5, 9: 0.0}), "other_layer", "holds the output of layer 8, expected"),
        (
            slot("slot 0", 3, {3: 1.0, POST_NORM: 0.0}),
            "post_norm",
            "holds the last hidden states (post-norm), expected",
        ),
        (slot("last", POST_NORM, {61: 0.0, POST_NORM: 1.0}), "pre_norm", "the last layer, 60, before the final norm"),
        (
            slot("slot 0", 3, {2: 0.4, 3: 0.2, 4: 0.3}),
            "other_weights",
            "slot 0 holds the output of layer 2, as expected",
        ),
        (slot("slot 0", 3, {2: 1.4, 3: 1.2, 4: 1.3}), "other_target", "slot 0 holds nothing of this target"),
        (slot("slot 0", 3, {3: 0.3, 31: 1.3}), "other_states", "holds other states than the output of layer 2"),
        (
            slot("slot 0", 3, {2: 1.4, 3: 1.2}, shift=Shift(-1, 3, 0.0)),
            "misaligned",
            "row t of slot 0 holds the output of layer 2 of token t-1, expected the output of layer 2 of token t",
        ),
        (
            slot("slot 0", 3, {2: 0.4, 3: 0.0}, row_errors={0: 0.0, 1: 0.0, 2: 0.9, 3: 0.9}),
            "rows",
            "the states of token 2 and all after it are wrong",
        ),
        (
            slot("slot 0", 3, {2: 0.4, 3: 0.0}, row_errors={0: 0.9, 1: 0.0, 2: 0.0, 3: 0.0}),
            "rows",
            "the states of token 0 are wrong",
        ),
        (
            slot("slot 0", 3, {2: 0.4, 3: 0.0}, row_errors={0: 0.9, 1: 0.9, 2: 0.0, 3: 0.0}),
            "rows",
            "the states of tokens 0 to 1 are wrong",
        ),
        (
            slot("slot 0", 3, {2: 1.4, 3: 0.9}, row_errors={0: 0.9, 1: 0.9, 2: 0.9, 3: 0.0}),
            "rows",
            "the states of tokens 0 to 2 are wrong",
        ),
        (
            slot("slot 0", 3, {2: 0.4, 3: 0.02}, precision="float8_e4m3fn"),
            "precision",
            "as float8_e4m3fn values: that rounding takes up to 6.25%",
        ),
    ],
)
def test_every_cause_has_its_sentence(measured: Measured, cause: str, text: str) -> None:
    found = report(*diagnose([[measured]], allowed_error("bfloat16", "float32"), "bfloat16"))

    [problem] = found.problems
    assert problem.kind == f"probe.{cause}"
    assert text in problem.message


def test_permuted_slots_have_their_sentence() -> None:
    slots = [
        slot("slot 0", 0, {0: 0.9, 3: 0.0, 31: 0.9}),
        slot("slot 1", 3, {0: 0.9, 3: 0.9, 31: 0.0}),
        slot("slot 2", 31, {0: 0.0, 3: 0.9, 31: 0.9}),
    ]

    [problem] = report(*diagnose([slots], 0.01)).problems

    assert problem.message.startswith(
        "the slots are permuted: slot 0, slot 1 and slot 2 hold the embedding and the outputs of layers 2, 30, "
        "expected the embedding and the outputs of layers 2, 30 (error 0.00%"
    )


def test_causes_and_distances_are_problems_of_their_own() -> None:
    def shifted(name: str, tokens: int) -> Measured:
        return slot(name, 3, {2: 1.4, 3: 1.2}, shift=Shift(tokens, 3, 0.0))

    found = report(*diagnose([[shifted("slot 0", 1), shifted("slot 1", 2), *early("a")[:1]]], 0.01))

    assert [problem.kind for problem in found.problems] == ["probe.misaligned", "probe.misaligned", "probe.one_early"]
    assert ["t+1" in found.problems[0].message, "t+2" in found.problems[1].message] == [True, True]
    assert "sample" not in found.problems[0].message, "there is only one"
    assert found.problems[0].message.endswith("(error 0.00%, 120.00% for the next closest)")


def test_a_problem_names_the_samples_that_have_it_and_the_median_error() -> None:
    right = [slot("slot 0", 3, {2: 0.2, 3: 0.0}, "c")]
    samples = [[slot("slot 0", 3, {2: error, 3: 0.3, 4: 0.2}, name)] for name, error in (("b", 0.001), ("a", 0.003))]

    found = report(*diagnose([right, *samples], 0.01))

    [problem] = found.problems
    assert problem.message.endswith("(error 0.20%, 20.00% for the next closest; in 2 of 3 samples: a, b)")
    lines = [line.split() for line in found.render().splitlines()[-2:]]
    assert [line[8:] for line in lines] == [["bfloat16", "1", "right"], ["bfloat16", "2", "one", "early"]]


def test_the_table_keeps_verdicts_apart_that_differ_in_one_thing() -> None:
    samples = [
        [slot("slot 0", 3, {2: 1.0, 3: 1.0, 9: 0.0}, "a")],
        [slot("slot 0", 3, {2: 1.0, 3: 1.0, 8: 0.0}, "b")],
        [slot("slot 0", 3, {2: 1.0, 3: 0.0}, "c")],
        [slot("slot 0", 3, {2: 1.0, 3: 0.02}, "d", precision="float8_e4m3fn")],
    ]

    lines = report(*diagnose(samples, 0.001, "bfloat16")).render().splitlines()[-4:]

    assert [line.rsplit("1  ", 1)[1].strip() for line in lines] == ["other layer", "other layer", "right", "precision"]


def test_the_table_shows_what_has_no_number() -> None:
    lost = slot("last hidden states", 61, {60: 2.0, 61: 1.5, POST_NORM: 1.7})
    alone = slot("slot 0", 0, {0: 0.0})

    found = report(*diagnose([[lost, alone]], 0.01))

    first, second = (line.split("  ") for line in found.render().splitlines()[-2:])
    assert [part.strip() for part in first if part] == [
        "last hidden states", "layer 60 (pre-norm)", "-", "150.00%", "170.00%", "bfloat16", "1", "other target",
    ]  # fmt: skip
    assert [part.strip() for part in second if part] == [
        "slot 0", "embedding", "embedding", "0.00%", "-", "bfloat16", "1", "right",
    ]  # fmt: skip
    assert found.problems[0].message.startswith("last hidden states hold nothing")


def test_padding_has_its_sentence() -> None:
    rows = {position: 1.0 / (1 + position) for position in range(40)}
    found = report(*diagnose([[slot("slot 0", 3, {2: 0.5, 3: 0.4}, row_errors=rows)]], 0.001))

    [problem] = found.problems
    assert problem.kind == "probe.padding"
    assert "padding before them" in problem.message


def test_scattered_noise_is_no_range_of_wrong_rows() -> None:
    rows = {position: 0.9 if position in (3, 9) else 0.0 for position in range(20)}
    [verdict] = diagnose([[slot("slot 0", 3, {2: 0.4, 3: 0.0}, row_errors=rows)]], 0.001)
    assert verdict.cause == "right"

    rows = {position: 0.9 if position in (3, 9, 19) else 0.0 for position in range(20)}
    [verdict] = diagnose([[slot("slot 0", 3, {2: 0.4, 3: 0.0}, row_errors=rows)]], 0.001)
    assert verdict.cause == "right", "nor if the last row is among them"

    rows = {position: 0.9 if position == 19 else 0.0 for position in range(20)}
    noisy = slot("slot 0", 3, {2: 0.9, 3: 0.0}, row_errors=rows)
    assert [item.cause for item in diagnose([[noisy]], 0.06)] == ["right"], "one row may be off in a coarse type"
    assert [item.cause for item in diagnose([[noisy]], 0.001)] == ["rows"]


def test_layers_that_cannot_be_told_apart_are_right() -> None:
    [verdict] = diagnose([[slot("slot 0", 3, {2: 0.010, 3: 0.012, 4: 0.5})]], 0.06)
    assert verdict.cause == "right"

    [verdict] = diagnose([[slot("slot 0", 3, {2: 0.0, 3: 0.012, 4: 0.5})]], 0.06)
    assert verdict.cause == "one_early", "an exact match beats one that is merely close enough"


def test_json_holds_problems_verdicts_and_facts() -> None:
    other = Problem("target", "target.config_digest", "differs", "use the other")
    found = report(*diagnose([early("a")], 0.01), others=[other], facts={"engine": "streamed"}, notes=["n"])

    value = json.loads(found.render(as_json=True))

    for name in ("problems", "probe"):
        jsonschema.validate(value, json.loads((DOCS / f"schemas/{name}.schema.json").read_text(encoding="utf-8")))
    assert value["ok"] is False
    assert [problem["kind"] for problem in value["problems"]] == ["target.config_digest", "probe.one_early"]
    assert value["where"] == "store" and value["engine"] == "streamed" and value["notes"] == ["n"]
    first = value["verdicts"][0]
    assert first["cause"] == "one_early" and first["found"] == 2 and first["expected"] == 3
    assert first["errors"] == {"2": 0.0, "3": 0.16, "4": 0.2}


def test_json_has_no_infinity() -> None:
    lost = slot("slot 0", 3, {2: float("inf"), 3: float("inf"), 4: float("inf")})

    text = report(*diagnose([[lost]], 0.01), facts={"engine": "sglang"}).render(as_json=True)

    assert "Infinity" not in text and "NaN" not in text
    assert json.loads(text)["verdicts"][0]["error"] is None
    jsonschema.validate(json.loads(text), json.loads((DOCS / "schemas/probe.schema.json").read_text(encoding="utf-8")))


def test_every_cause_is_in_the_documented_table_and_no_other() -> None:
    page = (DOCS / "probe.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    documented = {kind for row in rows for kind in re.findall(r"`(probe\.[a-z_]+|server\.[a-z_]+)`", row)}
    code = [DOCS.parent / "eagle3" / name for name in ("serve/server_probe.py", "target/engines/sglang_client.py")]
    server = {kind for path in code for kind in re.findall(r'"(server\.[a-z_]+)"', path.read_text(encoding="utf-8"))}

    assert documented == {f"probe.{cause}" for cause in SENTENCES} | server


def test_allowed_errors_grow_with_coarser_types() -> None:
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"
    assert allowed_error("float32", "float32") < 1e-3 < allowed_error("bfloat16", "float32") < 0.005
    assert 0.05 < allowed_error("bfloat16", "bfloat16") < 0.07

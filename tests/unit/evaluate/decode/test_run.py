"""`eagle3 decode` as a command, over a tiny target and a drafter that is right by chance."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.cli import main
from eagle3.config import DecodeConfig, build_config
from eagle3.data.chat import load_tokenizer
from eagle3.draft.config import DraftConfig
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError
from eagle3.evaluate.checkpoint import evaluate_checkpoint
from eagle3.evaluate.decode import worker
from eagle3.evaluate.decode.compare import find_deviation
from eagle3.evaluate.decode.run import run_decode
from eagle3.serve.export import export_run
from eagle3.target.extract import run_extract
from eagle3.target.generate import generate
from eagle3.target.identity import target_contract, target_identity
from eagle3.target.resolve import find_target
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.layers import LayerWiring
from eagle3.wiring.targets import read_target_config

from ...serve.cases import Run, make_state, serve, write_run
from ...target.cases import extract_config, target_config

SCHEMA = Path(__file__).parents[4] / "docs/schemas/decode.schema.json"
INDICES = (0, 1, 3)
TURNS = [["What is one?"], ["And two?", "Why?"], ["Tell me of three"]]


@dataclass(frozen=True)
class Case:
    target: Path
    run: Run
    folder: Path

    @property
    def sets(self) -> list[str]:
        return [str(self.folder / "first.jsonl"), str(self.folder / "second.jsonl")]

    def config(self, **values: Any) -> DecodeConfig:
        given = {
            "checkpoint": str(self.run.folder),
            "target": {"path": str(self.target), "dtype": "float32", "device": "cpu"},
            "prompts": self.sets,
            "max_new_tokens": 7,
            **values,
        }
        return build_config(DecodeConfig, given, "test")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("decode")
    target = make_tiny_llama(folder / "target", num_hidden_layers=5)
    files = find_target(target_config(target))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    said = Counter(t for p in ([5], [6, 7], [8]) for t in generate(model, [p], [12], (510,), 0.0, [0])[0].ids)
    vocab = DraftVocab(torch.tensor(sorted(token for token, _ in said.most_common(8))), 512)
    config = DraftConfig.from_target(read_target_config(target), 3, draft_vocab_size=8)
    identity = target_identity(files, load_tokenizer(str(target)), target_config(target))
    contract = target_contract(files, identity, LayerWiring(INDICES, 5), "post_norm", "float32")
    contract = contract.with_draft_vocab(vocab.digest)
    run = Run(folder / "run", folder, config, vocab, contract, make_state(config, spread=0.2), torch.zeros(0))
    write_run(run, read_target_config(target))
    for name, turns in (("first", TURNS[:2]), ("second", TURNS[2:])):
        lines = [json.dumps({"id": f"q{number}", "turns": item}) for number, item in enumerate(turns)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return Case(target, run, folder)


def answers(path: Path) -> dict[str, Any]:
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_each_turn_is_answered_in_order_and_equals_the_targets_own(case: Case, tmp_path: Path) -> None:
    report = run_decode(case.config(output=str(tmp_path / "out.jsonl"), topk=2))
    found = answers(tmp_path / "out.jsonl")
    assert list(found) == ["first/q0", "first/q1#1", "first/q1#3", "second/q0"]
    second = found["first/q1#3"]["messages"]
    assert [item["role"] for item in second] == ["user", "assistant", "user", "assistant"]
    assert second[1]["content"] == found["first/q1#1"]["messages"][-1]["content"] != ""
    assert (report.compared, report.deviations, report.exit_code) == (4, [], 0)
    assert {name: item.answers for name, item in report.sets.items()} == {"first": 3, "second": 1}
    assert report.total.committed == sum(len(line["answer_ids"]) - 1 for line in found.values())
    assert report.mean == sum(item.length for item in report.sets.values()) / 2
    lines = report.render().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["first", "second", "all", "mean"]
    assert "4 of 4 answers are the target's own" in report.render()


def test_the_file_is_extracted_and_evaluated_to_the_same_figures(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    report = run_decode(case.config(output=str(out), prompts=case.sets[:1], verify=False))
    run_extract(extract_config(case.target, out, tmp_path / "states", output_indices=list(INDICES)))
    store = evaluate_checkpoint(case.run.folder, tmp_path / "states", 3)
    alone = {line["id"]: line for line in answers(out).values()}
    assert store.result.samples == len(alone) == 3
    assert (store.result.histogram, store.result.committed) == (report.total.histogram, report.total.committed)
    assert store.result.length == report.total.length


def test_a_stopped_run_goes_on_and_ends_the_same(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = {"temperature": 0.9, "topk": 2}
    run_decode(case.config(output=str(tmp_path / "whole.jsonl"), **sampled))
    original, made = worker.Worker.answer, []

    def stops(self: worker.Worker, asked: worker.Asked) -> Any:
        made.append(asked.prompt.id)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, asked)

    monkeypatch.setattr(worker.Worker, "answer", stops)
    again = case.config(output=str(tmp_path / "cut.jsonl"), **sampled)
    with pytest.raises(KeyboardInterrupt):
        run_decode(again)
    assert not (tmp_path / "cut.jsonl").exists()
    report = run_decode(again)
    assert made == ["first/q0", "first/q1#1", "first/q1#3", "first/q1#3", "second/q0"] and report.decoded == 2
    whole, cut = answers(tmp_path / "whole.jsonl"), answers(tmp_path / "cut.jsonl")
    assert [line["answer_ids"] for line in whole.values()] == [line["answer_ids"] for line in cut.values()]
    # The same prompts in another order, one set alone: each sample is its own prompt's.
    alone = run_decode(case.config(output=str(tmp_path / "alone.jsonl"), prompts=case.sets[1:], **sampled))
    assert answers(tmp_path / "alone.jsonl")["q0"]["answer_ids"] == whole["second/q0"]["answer_ids"]
    assert alone.compared == 0
    with pytest.raises(ProblemsError) as caught:
        run_decode(case.config(output=str(tmp_path / "cut.jsonl"), temperature=0.8, topk=2))
    assert "settings.sampling.temperature" in str(caught.value)


def test_comparing_later_decodes_nothing_again(case: Case, tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    first = run_decode(case.config(output=out, verify=False))
    later = run_decode(case.config(output=out))
    assert (first.compared, first.decoded, later.compared, later.decoded) == (0, 4, 4, 0)
    assert later.total.speed_up is not None and first.total.speed_up is None


def test_a_wrong_answer_is_told_with_its_place(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3.evaluate.decode import loop

    original = loop.keep_greedy

    def wrong(tree: Any, logits: torch.Tensor) -> Any:
        path, own = original(tree, logits)
        return path, own if not tree.tokens else (own + 1) % 500

    monkeypatch.setattr(loop, "keep_greedy", wrong)
    report = run_decode(case.config(prompts=case.sets[1:]))
    (found,) = report.deviations
    assert found.place == 1 and found.gap and not found.near_tie and report.exit_code == 2
    assert "NOT a near tie" in report.render()
    lenient = run_decode(case.config(prompts=case.sets[1:], tolerance=1000.0))
    assert lenient.deviations[0].near_tie and lenient.exit_code == 0


def test_a_near_tie_is_told_with_its_gap(case: Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(case.target, dtype=torch.float32)
    own = generate(model, [[5, 6]], [6], (510,), 0.0, [0])[0].ids
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, *own[:2]]])).logits[0, -1]
        second = int(logits.topk(2).indices[1])
    said = [*own[:2], second, 0, 0, 0]
    found = find_deviation(model, ("set", "id"), [5, 6], said, own, None)
    assert found is not None and (found.place, found.own, found.said) == (2, own[2], second)
    assert found.gap == pytest.approx(float(logits[own[2]] - logits[second]), rel=1e-4) and not found.near_tie
    assert replace(found, allowed=found.gap).near_tie
    assert find_deviation(model, ("set", "id"), [5, 6], own, own, None) is None


def test_everything_wrong_is_said_before_weights_are_read(case: Case, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", num_hidden_layers=6)
    (other / "model.safetensors").unlink()
    bad = tmp_path / "first.jsonl"
    bad.write_text('{"id": "a"}\n')
    target = {"path": str(other), "dtype": "float32", "device": "cpu"}
    with pytest.raises(ProblemsError) as caught:
        run_decode(case.config(target=target, prompts=[case.sets[0], str(bad)]))
    kinds = [problem.kind for problem in caught.value.problems]
    assert set(kinds) == {
        "target.num_hidden_layers",
        "target.config_digest",
        "decode.sets",
        "conversations.messages",
    }


def test_a_folder_without_a_contract_needs_its_layers(case: Case, tmp_path: Path) -> None:
    exported = tmp_path / "export"
    export_run(serve(case.run, exported, dtype="float32"))
    own = run_decode(case.config(checkpoint=str(exported), prompts=case.sets[1:]))
    (exported / "eagle3_contract.json").unlink()
    with pytest.raises(ProblemsError) as caught:
        run_decode(case.config(checkpoint=str(exported), prompts=case.sets[1:]))
    assert [problem.kind for problem in caught.value.problems] == ["decode.layers"]
    given = case.config(checkpoint=str(exported), prompts=case.sets[1:], output_indices=list(INDICES))
    assert run_decode(given).total.histogram == own.total.histogram
    with pytest.raises(ProblemsError) as caught:
        run_decode(case.config(output_indices=[0, 1, 2]))
    assert [problem.kind for problem in caught.value.problems] == ["decode.layers"]


def test_the_command_prints_json_by_its_schema(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["decode", "--checkpoint", str(case.run.folder), "--target", str(case.target), "--max-new-tokens", "3"]
    rest = ["target.dtype=float32", "target.device=cpu", "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--prompts", *case.sets, *rest])
    value = json.loads(capsys.readouterr().out)
    jsonschema.validate(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert not stop.value.code and list(value["sets"]) == ["first", "second"] and value["compared"] == 4
    for wrong, kind in (([case.sets[0]], "config.override"), (["--prompts", case.sets[0], "steps=0"], "config.value")):
        with pytest.raises(SystemExit) as stop:
            main([*command, *wrong, *rest])
        assert stop.value.code == 2
        assert json.loads(capsys.readouterr().out)["problems"][0]["kind"] == kind


def test_too_long_prompts_and_bad_ones_are_counted(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    rows = [{"id": "a", "prompt": "Hi"}, {"id": "b", "prompt": "word " * 400}, {"id": "c"}, {"id": "d", "turns": [1]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run_decode(case.config(prompts=[str(file)], data={"max_length": 64, "skip_bad": True}, verify=False))
    assert report.total.answers == 1
    assert report.left_out == {"some": ["2 conversations.messages", "1 turns whose prompt has more than 64 tokens"]}

"""`eagle3 serve bench` against servers over real HTTP whose acceptance is known, and that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import BenchConfig
from eagle3.errors import ProblemsError
from eagle3.serve.bench import passes
from eagle3.serve.bench.result import BenchResult
from eagle3.serve.bench.run import run_bench
from tests.unit.serve.bench.fake_spec import FakeSpec, answer, rounds

Start = Callable[..., str]
Make = Callable[..., BenchConfig]


def by_hand(fake: FakeSpec, limit: int = 64) -> tuple[int, int, list[int], list[int]]:
    """Verifies, tokens committed, histogram and rounds that reach each depth, of the measured requests."""
    verifies = committed = 0
    histogram, reached = [0] * (fake.steps + 1), [0] * fake.steps
    for body in fake.requests:
        if body["sampling_params"]["max_new_tokens"] == 32:
            continue
        count = len(answer(body["input_ids"], body["sampling_params"]["max_new_tokens"], fake.length))
        left = count - 1
        for came in rounds(body["input_ids"], count, fake.pattern):
            kept = min(came, left)
            commit = min(kept + 1, left)
            histogram[kept] += 1
            for depth in range(min(commit, fake.steps)):
                reached[depth] += 1
            verifies, committed, left = verifies + 1, committed + commit, left - commit
    return verifies, committed, histogram, reached


def kinds(result: BenchResult) -> list[str]:
    return [problem.kind for problem in result.problems]


@pytest.mark.parametrize("pieces", [False, True])
def test_acceptance_is_that_of_a_simulation_by_hand(start: Start, make: Make, pieces: bool) -> None:
    fake = FakeSpec(pieces=pieces, delay=0.002)
    result = run_bench(make(start(fake), concurrency=[1, 2], passes=1))

    assert kinds(result) == []
    verifies, committed, histogram, reached = by_hand(fake)
    for row in result.rows:
        found = row.acceptance
        assert found is not None and found.histogram is not None
        assert 2 * found.verifies == verifies and 2 * found.committed == committed
        assert found.length.value == committed / verifies
        assert [2 * count for count in found.histogram] == histogram
        assert [2 * depth.reached for depth in found.by_depth] == reached
        taken = [sum(histogram[depth:]) for depth in (1, 2, 3)]
        assert [depth.share for depth in found.by_depth] == [a / b for a, b in zip(taken, reached, strict=True)]
        assert found.unsure == 0 and all(depth.standard_error > 0 for depth in found.by_depth[:2])
        assert row.requests == 8 and row.facts.name == "3 steps"
    assert fake.flushed == 2
    assert fake.most_in_flight == 2
    assert [point["batch"] for point in result.points] == [1, 2]
    assert result.points[0]["steps"] == 3 and result.points[0]["draft_tokens"] == 4


def test_warm_up_requests_do_not_count_and_are_asked_for(start: Start, make: Make) -> None:
    fake = FakeSpec()
    result = run_bench(make(start(fake), passes=1, warmup=5))
    assert result.rows[0].requests == 8 and len(fake.requests) == 13
    assert all(body["sampling_params"]["max_new_tokens"] == 32 for body in fake.requests[:5])


def test_older_releases_names_and_missing_fields(start: Start, make: Make) -> None:
    renamed = {"spec_correct_drafts_histogram": "spec_accept_histogram"}
    old = FakeSpec(rename=renamed, without=frozenset({"spec_num_correct_drafts"}))
    older = FakeSpec(without=frozenset({"spec_num_correct_drafts", "spec_correct_drafts_histogram"}))
    oldest = FakeSpec(without=older.without | {"spec_verify_ct"})
    result = run_bench(make(start(old), start(older), start(oldest), passes=1))

    assert kinds(result) == []
    lengths = [row.acceptance.length.value for row in result.rows if row.acceptance]
    verifies, committed, histogram, _ = by_hand(old)
    assert lengths == [committed / verifies] * 3
    assert [row.acceptance.histogram for row in result.rows if row.acceptance] == [tuple(histogram), None, None]


def test_rounds_in_one_piece_leave_the_last_one_unsure_but_the_length_exact(start: Start, make: Make) -> None:
    fake = FakeSpec(merged=2, pattern=(3, 2, 3))
    [row] = run_bench(make(start(fake), passes=1)).rows
    verifies, committed, _, _ = by_hand(fake)
    assert row.acceptance is not None and row.acceptance.length.value == committed / verifies
    assert row.acceptance.unsure > 0


def test_fault_23_a_server_that_accepts_nothing_is_broken_not_slow(start: Start, make: Make) -> None:
    broken, working = FakeSpec(pattern=(0,)), FakeSpec(steps=2, pattern=(1, 2))
    result = run_bench(make(start(broken), start(working), passes=1))

    assert kinds(result) == ["bench.broken"] and result.exit_code == 2
    assert "broken, not slow" in result.problems[0].message
    assert [point["steps"] for point in result.points] == [2], "no point of a plan"
    assert [row["state"] for row in result.to_dict()["rows"]] == ["broken", "ok"]


def test_a_server_that_speculates_and_does_not_say_is_no_data(start: Start, make: Make) -> None:
    silent = frozenset({"spec_verify_ct", "spec_accept_length", "spec_num_correct_drafts"})
    result = run_bench(make(start(FakeSpec(without=silent)), passes=1))
    assert kinds(result) == ["bench.no_acceptance"] and result.points == []
    counted = FakeSpec(without=silent, metrics=True)
    [row] = run_bench(make(start(counted), passes=1, seed=1)).rows
    verifies, committed, _, _ = by_hand(counted)
    assert row.acceptance is None and row.counted is not None
    assert row.counted.length.value == committed / verifies


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("429", r"refused \(429\)"),
        ("503", r"refused \(503\)"),
        ("500", r"refused \(500\)"),
        ("cut", "broke off|ended before its end mark"),
        ("json", "no JSON"),
        ("error", "out of memory"),
        ("abort", "ended for the reason 'abort'"),
        ("ids", "ids"),
    ],
)
def test_a_request_that_fails_is_listed_and_the_others_count(start: Start, make: Make, fault: str, said: str) -> None:
    fake = FakeSpec(fault=lambda number: fault if number == 2 else None)
    result = run_bench(make(start(fake), passes=1))

    [row] = result.rows
    assert kinds(result) == ["bench.failed"] and result.exit_code == 2
    assert row.requests == 7 and len(row.failures) == 1
    assert re.search(said, row.failures[0].reason), row.failures[0].reason


def test_figures_that_cannot_be_are_named(start: Start, make: Make) -> None:
    fake = FakeSpec(fault=lambda number: "meta" if number == 1 else None)
    result = run_bench(make(start(fake), passes=1))
    assert kinds(result) == ["bench.meta_info"] and "1000 verifies" in result.problems[0].message


def test_other_traffic_is_found_by_the_counters_and_measured_anew(start: Start, make: Make) -> None:
    fake = FakeSpec(metrics=True, foreign=3)
    cfg = make(start(fake), passes=1)
    result = run_bench(cfg)
    assert kinds(result) == ["bench.traffic"] and result.rows[0].foreign == 3 and result.points == []
    asked, fake.foreign = len(fake.requests), 0
    assert kinds(run_bench(cfg)) == [] and len(fake.requests) > asked


def test_servers_take_turns_and_the_speed_up_has_an_interval(start: Start, make: Make) -> None:
    fast, slow = FakeSpec(delay=0.002, pattern=(2,)), FakeSpec(steps=0, delay=0.002)
    cfg = make(start(fast), top={"baseline_url": start(slow)}, passes=2, concurrency=[2])
    result = run_bench(cfg)

    ours, baseline = result.rows
    assert kinds(result) == [] and baseline.baseline and baseline.name == "no drafter"
    assert ours.speedup is not None and ours.decode_speedup is not None and ours.speed is not None
    assert ours.speedup.interval[0] <= ours.speedup.value <= ours.speedup.interval[1]
    assert 1.8 < ours.decode_speedup.value < 3.5, "two of three drafts are accepted in each round of the same time"
    assert ours.against["baseline"].compared == 16 and ours.against["baseline"].different == 0
    assert ours.shorter == 1.0
    assert result.baseline == [{"batch": 2, "tok_s": baseline.speed.decode_tok_s.value}]  # type: ignore[union-attr]
    assert fast.most_in_flight == 2


def test_answers_that_differ_from_the_baseline_and_the_reference_are_counted(
    start: Start, make: Make, tmp_path: Path
) -> None:
    first = FakeSpec(change=lambda ids: [ids[0], 77, *ids[2:]])
    reference = tmp_path / "reference.jsonl"
    cfg = make(start(first), top={"baseline_url": start(FakeSpec(steps=0))}, passes=1)
    answers = tmp_path / "answers.jsonl"
    result = run_bench(cfg.model_copy(update={"answers": str(answers)}))
    assert result.rows[0].against["baseline"].different == 8
    assert any("not the baseline's" in note and "from token 1 on" in note for note in result.notes)

    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 8
    records = []
    for line in lines:
        user = {"role": "user", "content": f"Question {line['id'].removeprefix('mine/p')}?"}
        said = {"role": "assistant", "content": line["text"]}
        records.append({"id": line["id"], "messages": [user, said], "answer_ids": line["answer_ids"]})
    records[3]["answer_ids"][4] += 1
    reference.write_text("".join(json.dumps(record) + "\n" for record in records))
    again = run_bench(make(start(first), name="again", passes=1, reference=str(reference)))
    assert again.rows[0].against["reference"].compared == 8
    assert again.rows[0].against["reference"].different == 1


def test_a_server_that_dies_is_a_lost_row_and_the_other_goes_on(start: Start, make: Make) -> None:
    dying, steady = FakeSpec(), FakeSpec(steps=2)
    with dying.running() as url:
        cfg = make(url, start(steady), passes=2)
        seen = run_bench(cfg.model_copy(update={"load": cfg.load.model_copy(update={"passes": 1})}))
        assert kinds(seen) == []
        dying.seed = 8  # another start, seen from outside
        anew = run_bench(cfg)
        assert kinds(anew) == [] and anew.rows[0].instances == 2
        assert any("2 starts" in note for note in anew.notes)
    cfg = make(url, start(steady), name="gone")
    with pytest.raises(ProblemsError, match=r"server\.down"):
        run_bench(cfg)


def test_a_server_that_is_started_anew_in_a_pass_is_lost(start: Start, make: Make) -> None:
    fake = FakeSpec()

    def restarts(number: int) -> None:
        fake.seed += number == 3

    fake.fault = restarts
    result = run_bench(make(start(fake), passes=1))
    assert kinds(result) == ["bench.lost"] and "started anew" in result.problems[0].message
    assert result.rows[0].requests == 0


def test_a_stopped_bench_goes_on_and_another_one_is_refused(start: Start, make: Make) -> None:
    fake = FakeSpec()
    url = start(fake)
    run_bench(make(url, passes=1))
    asked = len(fake.requests)
    result = run_bench(make(url, passes=2, warmup=4))
    assert len(fake.requests) == asked + 4 + 8 and result.rows[0].passes == 2
    with pytest.raises(ProblemsError, match=r"bench\.output.*other prompts, settings"):
        run_bench(make(url, passes=1, max_new_tokens=10))
    fake.steps = 2
    with pytest.raises(ProblemsError, match=r"bench\.output"):
        run_bench(make(url, passes=1))


def test_turns_are_asked_in_order_behind_the_servers_own_answers(start: Start, make: Make) -> None:
    fake = FakeSpec()
    records = [{"id": name, "turns": [f"First {name}?", "And then?"]} for name in "abcd"]
    result = run_bench(make(start(fake), records=records, passes=1))
    [row] = result.rows
    assert row.requests == 8 and kinds(result) == []
    prompts = [body["input_ids"] for body in fake.requests if body["sampling_params"]["max_new_tokens"] == 64]
    assert all(len(second) > len(first) for first, second in zip(prompts[::2], prompts[1::2], strict=True))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"concurrency": [9]}, "bench.too_few"),
        ({"concurrency": [2, 2]}, "given twice"),
        ({"temperature": 0.5, "reference": "x.jsonl"}, "leave one out"),
        ({"sets": {}}, "sets"),
    ],
)
def test_what_cannot_be_sent_is_one_error(start: Start, make: Make, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemsError, match=said):
        run_bench(make(start(FakeSpec()), **values))


def test_a_baseline_that_speculates_and_a_short_context_are_refused_together(start: Start, make: Make) -> None:
    short = FakeSpec(info={"context_length": 6})
    with pytest.raises(ProblemsError) as caught:
        run_bench(make(start(short), top={"baseline_url": start(FakeSpec())}))
    assert [problem.kind for problem in caught.value.problems] == ["bench.context", "bench.baseline"]


def test_the_order_of_servers_turns_round_with_every_pass(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int, int]] = []
    whole = passes.run_pass

    async def noted(server: Any, load: Any, facts: Any, key: str, concurrency: int, number: int, advance: Any) -> Any:
        order.append((facts.name, concurrency, number))
        return await whole(server, load, facts, key, concurrency, number, advance)

    monkeypatch.setattr("eagle3.serve.bench.run.run_pass", noted)
    run_bench(make(start(FakeSpec()), top={"baseline_url": start(FakeSpec(steps=0))}, passes=2, concurrency=[1, 3]))
    a, b = "3 steps", "no drafter"
    assert order == [
        (name, c, number) for c in (1, 3) for number, names in ((0, (a, b)), (1, (b, a))) for name in names
    ]


def test_prefix_caches_are_emptied_kept_or_each_request_has_its_own(start: Start, make: Make) -> None:
    fake = FakeSpec(flushes=False)
    url = start(fake)
    result = run_bench(make(url, passes=1))
    assert any("could not be emptied" in note for note in result.notes)
    fake.flushes = True
    assert run_bench(make(url, name="keep", passes=1, prefix_cache="keep")).rows[0].flushed is None
    assert fake.flushed == 0 and not any("extra_key" in body for body in fake.requests)
    before = len(fake.requests)
    run_bench(make(url, name="off", passes=2, prefix_cache="off"))
    keys = [body["extra_key"] for body in fake.requests[before:] if "extra_key" in body]
    assert len(keys) == len(set(keys)) == 16 and fake.flushed == 2


def test_others_requests_in_flight_are_seen_without_counters(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_IDLE_SECONDS", 0.05)
    fake = FakeSpec()
    fake.in_flight = 2  # of somebody else, all the time
    result = run_bench(make(start(fake), passes=1))
    assert kinds(result) == ["bench.traffic"] and result.rows[0].foreign == 4


def test_sampling_is_sent_and_another_seed_for_each_prompt(start: Start, make: Make) -> None:
    fake = FakeSpec()
    run_bench(make(start(fake), passes=1, temperature=0.7, top_p=0.9, ignore_eos=True, max_new_tokens=5))
    sent = [body["sampling_params"] for body in fake.requests if "ignore_eos" in body["sampling_params"]]
    assert {(item["temperature"], item["top_p"], item["ignore_eos"]) for item in sent} == {(0.7, 0.9, True)}
    assert len({item["sampling_seed"] for item in sent}) == 8


def test_a_server_that_serves_something_else_is_refused(start: Start, make: Make) -> None:
    with pytest.raises(ProblemsError, match=r"server\.other_target"):
        run_bench(make(start(FakeSpec(model="/models/another"))))

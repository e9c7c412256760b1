"""What a server says of a request, turned into rounds, against the walk of `eagle3 evaluate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle3.evaluate.walks import walk
from eagle3.serve.bench.counters import SchedulerAcceptance, pooled_schedulers, read_counters
from eagle3.serve.bench.facts import _in_flight, sglang_facts
from eagle3.serve.bench.rounds import Rounds, SenselessError, pooled, rounds_of

STEPS = 3


def served(matches: torch.Tensor, count: int) -> tuple[dict[str, Any], list[int]]:
    """What SGLang would say, and its pieces: it counts a round's accepted drafts before it cuts the answer."""
    leading = matches.long().cumprod(0).sum(0).tolist()
    done, accepted, pieces = 1, [], [1]
    while done < count:
        accepted.append(leading[done - 1])
        pieces.append(min(accepted[-1] + 1, count - done))
        done += pieces[-1]
    histogram = [accepted.count(item) for item in range(max(accepted, default=0) + 1)]
    return {"spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram}, pieces


@pytest.mark.parametrize("seed", range(40))
def test_the_rounds_are_those_of_the_walk_wherever_the_answer_ends(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 30, (1,), generator=generator))
    matches = torch.rand(STEPS, 40, generator=generator) < 0.75
    meta, pieces = served(matches, count)
    expected = walk(matches, [(1, 1 + count)], STEPS)
    found = rounds_of(meta, count, pieces, STEPS)

    assert found == Rounds(expected.rounds, expected.committed, expected.histogram, expected.reached)
    assert found is not None and found.taken == expected.taken and found.accepted == expected.accepted
    without = rounds_of(meta, count, (), STEPS)
    assert without is not None and (without.verifies, without.committed) == (found.verifies, found.committed)
    assert without.unsure or without == found


@pytest.mark.parametrize(
    ("meta", "count", "said"),
    [
        ({"spec_verify_ct": 9}, 9, "9 verifies cannot"),
        ({"spec_verify_ct": 0}, 9, "without a verify"),
        ({"spec_verify_ct": "3"}, 9, "expected a count"),
        ({"spec_verify_ct": 3, "spec_accept_histogram": [1, 1]}, 6, "does not hold 3"),
        ({"spec_verify_ct": 3, "spec_accept_histogram": [3, 0]}, 9, "cannot have committed 8"),
        ({"spec_verify_ct": 3, "spec_accept_histogram": [3, 0]}, 1, "cannot have committed only 0"),
        ({"spec_verify_ct": 2, "spec_accept_histogram": [0, 2]}, 4, None),
        ({"spec_verify_ct": 2, "spec_accept_histogram": [0, 0, 0, 2]}, 2, "cannot have committed only 1"),
    ],
)
def test_what_cannot_be_is_said(meta: dict[str, Any], count: int, said: str | None) -> None:
    if said is None:
        assert rounds_of(meta, count) == Rounds(2, 3, (0, 2), (2,))
        return
    with pytest.raises(SenselessError, match=said):
        rounds_of(meta, count)


def test_an_answer_of_one_token_has_no_rounds_and_a_plain_server_says_nothing() -> None:
    assert rounds_of({"spec_verify_ct": 0}, 1, [1], STEPS) == Rounds(0, 0, (0, 0, 0, 0), (0, 0, 0))
    assert rounds_of({}, 5) is None


def test_pooling_sums_before_it_divides() -> None:
    found = pooled([Rounds(10, 20, (5, 0, 5), (10, 5)), Rounds(30, 120, (0, 0, 0, 30), (30, 30, 30))])
    assert (found.verifies, found.committed) == (40, 140)
    assert found.histogram == (5, 0, 5, 30) and found.reached == (40, 35, 30)
    assert pooled([found, Rounds(1, 1)]).histogram is None


def test_fault_24_schedulers_weigh_as_many_as_they_verified_since_before() -> None:
    nothing: dict[int, SchedulerAcceptance | None] = dict.fromkeys(range(4))
    after = nothing | {1: SchedulerAcceptance(2.0, 10), 2: SchedulerAcceptance(4.0, 30)}
    found = pooled_schedulers(nothing, after)
    assert found is not None and found.committed / found.verifies == 3.5

    before = nothing | {1: SchedulerAcceptance(1.5, 100)}
    later = after | {1: SchedulerAcceptance((1.5 * 100 + 2.0 * 10) / 110, 110)}
    found = pooled_schedulers(before, later)
    assert found is not None and found.committed / found.verifies == 3.5
    assert pooled_schedulers(nothing, nothing) is None


def test_fault_24_counters_of_all_schedulers_are_summed_and_earlier_traffic_is_taken_off() -> None:
    def page(*rows: tuple[int, int, int]) -> str:
        names = ("num_requests_total", "generation_tokens_total", "spec_verify_calls_total")
        return "\n".join(
            f'sglang:{name}{{dp_rank="{rank}",le="}}"}} {value:.1f}'
            for rank, row in enumerate(rows)
            for name, value in zip(names, row, strict=True)
        )

    before = read_counters(page((50, 200, 100), (0, 0, 0)))
    after = read_counters(page((51, 221, 110), (2, 122, 30)))
    added = after.since(before)
    assert added is not None and added.requests == 3
    assert added.rounds == Rounds(40, 140)
    assert before.since(after) is None, "counters never fall: another process counts"
    assert read_counters("").since(before) == read_counters("")
    vllm = read_counters("vllm:spec_decode_num_drafts_total 40\nvllm:spec_decode_num_accepted_tokens_total 100")
    assert vllm.rounds == Rounds(40, 140)


@pytest.mark.parametrize("length", [1e-320, 0.5, float("inf")])
def test_an_absurd_length_is_said_and_no_overflow(length: float) -> None:
    with pytest.raises(SenselessError):
        rounds_of({"spec_accept_length": length}, 17)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_a_counter_that_is_no_number_counts_nothing(value: str) -> None:
    assert read_counters(f"sglang:num_requests_total {value}\nsglang:generation_tokens_total 3").requests is None


def test_facts_of_other_types_or_absurd_say_nothing() -> None:
    odd = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 10**9, "speculative_num_draft_tokens": -1}
    found = sglang_facts({**odd, "speculative_eagle_topk": "1", "internal_states": 5})
    assert found.speculates is True and (found.steps, found.topk, found.draft_tokens) == (None, None, None)
    assert [_in_flight([row]) for row in ({"num_running_reqs": "1"}, {"num_reqs": -1}, {}, 3)] == [None] * 4
    assert _in_flight({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}) == 3

"""`eagle3 regenerate`: answers to prompts from the target itself, which is what a drafter will be asked to draft.

Finished answers are on disk at once (`answer_file.py`); a run that was killed goes on where it stopped. The target runs
in this process, or on servers (`answer_servers/`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle3.config import RegenerateConfig
from eagle3.data.chat import load_tokenizer
from eagle3.data.chat.render import Renderer
from eagle3.data.conversations import ConversationStream
from eagle3.errors import EXIT_OK, EXIT_PROBLEMS, EXIT_STOPPED, Problem, problem_error, raise_problems
from eagle3.files import digest_json, refuse_url
from eagle3.progress import progress
from eagle3.target.answer_file import AnswerFile, Line
from eagle3.target.answer_servers.run import answer_from_servers
from eagle3.target.dialogue import Prompt, each_dialogue, make_dialogues
from eagle3.target.dialogue_file import DialogueFile
from eagle3.target.engines.transformers import load_model
from eagle3.target.generate import Generated, eos_ids, generate, prompt_seed
from eagle3.target.identity import target_identity
from eagle3.target.regenerate_plan import RegeneratePlan, make_plan
from eagle3.target.regenerate_session import Session
from eagle3.target.resolve import TargetFiles, find_target

_OWN_WEIGHTS = ("weights", "dtype")
"""What answers of this process depend on, and those of servers do not."""


@dataclass(frozen=True)
class RegenerateReport:
    """What is in the output.

    Attributes:
        output: the file.
        answers: its lines, one an answer.
        generated: how many answers this run made.
        tokens: of all answers.
        stopped: answers that ended by themselves; the others were cut at the limit.
        too_long: prompts left out because they have more than `data.max_length` tokens.
        skipped: records left out as bad (`data.skip_bad`), by reason.
        dropped: answers that were cut, and left out for that (`cut_off`).
        after_cut: turns that were not asked, since an earlier answer of the conversation was cut.
        failed: prompts that got no answer.
        failures: the file that lists them.
        prompt_tokens, answer_tokens: that this run sent and got.
        cost: of this run; None without prices.
        servers: a line for each.
        interrupted: the run was asked to stop; the output is not there yet.
    """

    output: str
    answers: int
    generated: int
    tokens: int
    stopped: int
    too_long: int
    skipped: Mapping[str, int]
    dropped: int = 0
    after_cut: int = 0
    failed: int = 0
    failures: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float | None = None
    servers: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """Of the command: 2 if prompts have no answer, 75 if it was asked to stop."""
        return EXIT_STOPPED if self.interrupted else EXIT_PROBLEMS if self.failed else EXIT_OK

    def render(self) -> str:
        cost = "" if self.cost is None else f", cost {self.cost:,.2f}"
        lines = [
            f"{self.output}: {self.answers:,} answers, {self.tokens:,} tokens; {self.generated:,} made by this run",
            f"{self.stopped:,} ended by themselves, {self.answers - self.stopped:,} were cut at the limit",
            f"this run: {self.prompt_tokens:,} prompt tokens, {self.answer_tokens:,} answer tokens{cost}",
        ]
        left_out = [
            (self.too_long, "prompts that are too long"),
            (sum(self.skipped.values()), f"bad records{_reasons(self.skipped)}"),
            (self.dropped, "answers that were cut at the limit"),
            (self.after_cut, "turns after an answer that was cut"),
        ]
        if any(count for count, _ in left_out):
            lines.append("left out: " + ", ".join(f"{count:,} {what}" for count, what in left_out if count))
        lines += self.servers
        if self.interrupted:
            lines.append("stopped before the end; the same command goes on")
        if self.failed:
            lines.append(
                f"{self.failed:,} prompts have no answer, see {self.failures}; the same command asks them again"
            )
        return "\n".join(lines)


def run_regenerate(cfg: RegenerateConfig) -> RegenerateReport:
    """Answers every prompt of `cfg.data` and writes `cfg.output`.

    Each line holds `id`, `source`, `messages` (the answer last), `tools` if any, `finish` (`stop` or `length`),
    `answer_ids`, and `prompt_digest`. Killed and started again, it answers what is missing.

    Raises:
        ProblemsError: the target, the prompts, the servers or the output cannot be used, or an earlier run had other
            settings (each is listed).
    """
    with _opened(cfg) as (session, files, skipped):
        servers: list[str] = []
        try:
            if session.missing:
                print(make_plan(session).render(), file=sys.stderr)
                if cfg.server is None:
                    _answer_here(session, files)
                else:
                    servers = answer_from_servers(session, files, cfg.server)
        finally:
            failures = session.write_failures()
        places = session.places()
        if not session.interrupted and (places or not session.failures):
            session.output.finish_places(places)
        return _report(session, places, servers, skipped, failures)


def plan_regenerate(cfg: RegenerateConfig) -> RegeneratePlan:
    """What a run would ask; loads no weights, asks no server.

    Raises:
        ProblemsError: as `run_regenerate`, but for the servers.
    """
    with _opened(cfg) as (session, _, _):
        return make_plan(session)


def make_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Any],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt], list[Any]]:
    """The prompt of each conversation's last turn (an answer that is already there is dropped), and what is wrong
    with those that have none.
    """
    made, problems = make_dialogues(tokenizer, conversations, template_kwargs)
    return [prompt for _, prompt in made], problems


def iter_answers(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    context_length: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    done: frozenset[str] = frozenset(),
) -> Iterator[list[tuple[Prompt, Generated]]]:
    """Answers in batches of prompts of similar length.

    Which prompts share a batch does not depend on `done`, so a resumed run repeats an uninterrupted one; a batch is
    run if any of its prompts is not done, and only those that are not are returned.

    Args:
        prompts: each shorter than `context_length`.
        max_new_tokens: longest answer, in tokens; shorter where the context ends.
        batch_size: prompts a batch.
        context_length: of the target, in tokens.
        temperature, top_p, top_k, seed: see `generate`.
        done: ids of prompts that have their answer already.
    """
    stop_ids, sampling = eos_ids(model), (temperature, top_p, top_k, seed)
    for numbers in _batches([len(prompt.input_ids) for prompt in prompts], batch_size):
        batch = [prompts[number] for number in numbers]
        if all(prompt.id in done for prompt in batch):
            continue
        answers = _answer(model, batch, stop_ids, max_new_tokens, context_length, sampling)
        yield [pair for pair in zip(batch, answers, strict=True) if pair[0].id not in done]


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of the prompts that are answered together, which are of similar length."""
    order = sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    return (order[begin : begin + size] for begin in range(0, len(order), size))


def _answer(
    model: PreTrainedModel,
    batch: Sequence[Prompt],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    context_length: int,
    sampling: tuple[float, float, int | None, int],
) -> list[Generated]:
    """`sampling` is temperature, top_p, top_k and seed."""
    temperature, top_p, top_k, seed = sampling
    rows = [prompt.input_ids for prompt in batch]
    limits = [min(max_new_tokens, context_length - len(row)) for row in rows]
    seeds = [prompt_seed(seed, prompt.id) for prompt in batch]
    return generate(model, rows, limits, stop_ids, temperature, seeds, top_p, top_k)


@contextmanager
def _opened(cfg: RegenerateConfig) -> Iterator[tuple[Session, TargetFiles, Mapping[str, int]]]:
    """The session of a config, its output locked while the block runs; and the bad records left out, by reason."""
    refuse_url(cfg.output, "the answers", "write to a local file")
    files = find_target(cfg.target, weights=cfg.server is None)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    longest = min(cfg.data.max_length, files.facts.context_length - 1)
    conversations = ConversationStream(cfg.data)
    dialogues = DialogueFile(Path(cfg.data.cache or Path(cfg.output).parent), longest, conversations.share)
    problems: list[Problem] = []
    for found in each_dialogue(tokenizer, conversations, cfg.data.chat_template_kwargs, cfg.turns):
        problems += found if isinstance(found, list) else dialogues.add(*found)
    if not cfg.data.skip_bad:
        raise_problems(problems, f"{len({item.where for item in problems})} prompts cannot be rendered")
    skipped = conversations.dropped
    for reason in {item.where: item.kind for item in reversed(problems)}.values():  # the first of each prompt's
        skipped.add(reason, None)
    if not any(True for _ in dialogues.asked()):
        message = f"every prompt has more than {longest} tokens"
        raise problem_error(cfg.data.path, "regenerate.too_long", message, "raise data.max_length")
    renderer = Renderer(tokenizer, cfg.data.chat_template_kwargs)
    settings = _settings(cfg, files, tokenizer)
    with AnswerFile(Path(cfg.output), settings, dialogues, lambda line: _digest_of(renderer, line)) as output:
        context, too_long = files.facts.context_length, dialogues.too_long
        session = Session(cfg, tokenizer, output, dialogues, longest, context, too_long=too_long)
        yield session, files, skipped.by_reason()


def _answer_here(session: Session, files: TargetFiles) -> None:
    """All that waits, from the target in this process: first turns, then second ones, and so on."""
    cfg, begun = session.cfg, 0
    model = load_model(files, cfg.target)
    stop_ids, sampling = eos_ids(model), (cfg.temperature, cfg.top_p, cfg.top_k, cfg.seed)
    with progress("regenerate", session.missing, "answers") as advance:
        while session.waiting:
            asked = session.prompts[begun]
            indices = array("Q", sorted(asked))
            lengths = array("Q", (session.dialogues.prompt_tokens(asked[index]) for index in indices))
            for places in _batches(lengths, cfg.batch_size):
                numbers = [indices[place] for place in places]
                waits = {index for index in numbers if session.waiting.get(index) == asked[index]}
                if not waits:
                    continue
                batch = [session.dialogues.prompt(asked[index]) for index in numbers]
                answers = _answer(model, batch, stop_ids, cfg.max_new_tokens, session.context_length, sampling)
                made = zip(numbers, batch, answers, strict=True)
                lines = {index: session.line(prompt, answer) for index, prompt, answer in made if index in waits}
                session.output.append(list(lines.values()))
                for index, line in lines.items():
                    session.took(index, line)
                advance(len(lines), f"{session.spent.answer_tokens:,} tokens")
            begun += 1


def _reasons(counts: Mapping[str, int]) -> str:
    found = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    return f" ({found})" if found else ""


def _digest_of(renderer: Renderer, line: Line) -> str:
    """The digest of the prompt of an answer that earlier releases wrote."""
    return digest_json(renderer.prompt(line["messages"][:-1], line.get("tools"), f"answer {line['id']!r}"))


def _report(
    session: Session, places: Sequence[int], servers: list[str], skipped: Mapping[str, int], failures: Path
) -> RegenerateReport:
    return RegenerateReport(
        output=session.cfg.output,
        answers=len(places),
        generated=session.spent.answers,
        tokens=sum(map(session.output.tokens, places)),
        stopped=sum(map(session.output.stopped, places)),
        too_long=session.too_long,
        skipped=skipped,
        dropped=sum(map(bool, session.chosen)) - len(places),
        after_cut=session.after_cut,
        failed=len(session.failures),
        failures=str(failures),
        prompt_tokens=session.spent.prompt_tokens,
        answer_tokens=session.spent.answer_tokens,
        cost=session.cost(session.spent),
        servers=servers,
        interrupted=session.interrupted,
    )


def _settings(cfg: RegenerateConfig, files: TargetFiles, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What an answer depends on, besides its prompt. Keys that earlier releases do not know are there only if used."""
    target = target_identity(files, tokenizer, cfg.target)
    sampled: dict[str, Any] = {}
    if cfg.temperature and cfg.top_p < 1:
        sampled["top_p"] = cfg.top_p
    if cfg.temperature and cfg.top_k is not None:
        sampled["top_k"] = cfg.top_k
    if cfg.server is not None:
        target = {key: value for key, value in target.items() if key not in _OWN_WEIGHTS}
        sampled["answered_by"] = "servers"
    return {
        "target": target,
        "max_length": cfg.data.max_length,
        "chat_template_kwargs": cfg.data.chat_template_kwargs,
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": cfg.temperature,
        "seed": cfg.seed if cfg.temperature else None,
        **sampled,
    }

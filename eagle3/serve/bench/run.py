"""`eagle3 serve bench`: the servers in turns, pass by pass, each pass on disk when it is done."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from eagle3.config import AnswerServerSection, BenchConfig
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json, only_writer, refuse_url, write_json_atomic, write_text_atomic
from eagle3.progress import progress
from eagle3.serve.bench.facts import Facts, look
from eagle3.serve.bench.measured import Pass, read_pass, write_pass
from eagle3.serve.bench.passes import ServerLostError, run_pass
from eagle3.serve.bench.prompts import Load, make_load
from eagle3.serve.bench.result import BenchResult
from eagle3.serve.bench.rows import Row, make_row
from eagle3.target.answer_servers.identity import Wanted, identify, names_of
from eagle3.target.answer_servers.pool import server_urls
from eagle3.target.answer_servers.server import FaultyError, LockedOutError, Server, UnavailableError

LOCK, PASSES, RESULT = "bench.lock", "passes", "bench.json"
_START = "start the server, wait until it is ready (`eagle3 serve wait`), and check the address"
_CONNECT_SECONDS = 10.0


@dataclass
class Measured:
    """A server, and what was measured of it.

    Attributes:
        baseline: the others are compared with it.
        passes: by concurrency, in order.
        lost: why no more passes of it are measured; empty while it is there.
        tag: begins the names of its passes' files.
    """

    server: Server
    facts: Facts
    baseline: bool
    passes: dict[int, list[Pass]] = field(default_factory=dict)
    lost: str = ""
    tag: str = ""

    def __post_init__(self) -> None:
        self.tag = self.tag or digest_json(self.server.url)[7:15]


def run_bench(cfg: BenchConfig) -> BenchResult:
    """Measures every server at every concurrency, and writes `bench.json` into `cfg.output`.

    Passes that an earlier run of the same bench measured are taken from there.

    Raises:
        ProblemsError: the prompts, a server or the output cannot be used; nothing was measured.
    """
    refuse_url(cfg.output, "a bench", "write to a local folder")
    urls = server_urls(cfg.all_urls)
    key = _api_key(cfg.api_key_env)
    load = make_load(cfg.load, cfg.target)
    folder = Path(cfg.output)
    with only_writer(folder, LOCK):
        return asyncio.run(_run(cfg, load, folder, urls, key))


async def _run(cfg: BenchConfig, load: Load, folder: Path, urls: Sequence[str], key: str | None) -> BenchResult:
    async with client(key, cfg.load.timeout_seconds) as http:
        servers = [make_server(url, cfg, http) for url in urls]
        found = await open_servers(servers, load, cfg, cfg.baseline_url is not None)
        await measure(found, load, folder / PASSES)
    result = make_result(found, load)
    write_json_atomic(folder / RESULT, result.to_dict())
    if cfg.answers is not None:
        write_answers(Path(cfg.answers), found[0])
    return result


def client(key: str | None, timeout: float) -> httpx.AsyncClient:
    """An HTTP client without a limit on connections; a context manager."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy would be measured too
    )


def make_server(url: str, cfg: BenchConfig, http: httpx.AsyncClient) -> Server:
    """One of the servers to measure, not asked yet."""
    section = AnswerServerSection(
        urls=[url],
        api=cfg.api,
        model=cfg.model,
        api_key_env=cfg.api_key_env,
        timeout_seconds=cfg.load.timeout_seconds,
        retries=0,
    )
    return Server(url, section, http)


async def open_servers(
    servers: Sequence[Server], load: Load, cfg: BenchConfig, last_is_baseline: bool
) -> list[Measured]:
    """Finds out what each serves, and its settings.

    Raises:
        ProblemsError: kinds `server.*`, of every server that cannot be measured; `bench.baseline`: it has a drafter.
    """
    wanted = Wanted(load.files, load.tokenizer, load.sampling, names_of(cfg.target, load.files), load.chat_ids)
    problems: list[Problem] = []
    found = []
    for place, server in enumerate(servers):
        baseline = last_is_baseline and place == len(servers) - 1
        try:
            print(f"{server.url}: asked what it serves, for at most {server.cfg.timeout_seconds:g} s", file=sys.stderr)
            print(await identify(server, wanted), file=sys.stderr)
            problems += server.wrong
            if server.wrong:
                continue
            facts = await look(server)
        except LockedOutError as error:
            fix = f"set the environment variable {cfg.api_key_env} (its name is api_key_env)"
            problems.append(Problem(server.url, "server.api_key", str(error), fix))
            continue
        except (UnavailableError, FaultyError) as error:
            message = str(error).removeprefix(server.url).removeprefix(":").strip()
            problems.append(Problem(server.url, "server.down", message, _START))
            continue
        if baseline and facts.speculates:
            message = f"is to be the baseline, but speculates ({facts.name})"
            problems.append(Problem(server.url, "bench.baseline", message, "start it without a drafter"))
        problems += _context_problems(server.url, facts, load)
        found.append(Measured(server, facts, baseline))
    raise_problems(problems)
    return found


def _context_problems(url: str, facts: Facts, load: Load) -> list[Problem]:
    longest = max(len(talk.first.input_ids) for talk in load.talks)
    if facts.context_length is None or longest < facts.context_length - 1:
        return []
    count = sum(len(talk.first.input_ids) >= facts.context_length - 1 for talk in load.talks)
    message = f"its context is {facts.context_length} tokens; {count} prompts have as many, the longest {longest}"
    fix = "start it with a longer context, or lower max_length of the sets, which leaves such prompts out"
    return [Problem(url, "bench.context", message, fix)]


async def measure(servers: Sequence[Measured], load: Load, folder: Path, only_read: bool = False) -> None:
    """Every pass that is not on disk yet: at each concurrency the servers in turns, every second round backwards, so
    that what drifts on the machine meets all of them alike. A server that is lost is left out from then on.

    Args:
        folder: of the passes.
        only_read: take what is there, and measure nothing.
    """
    todo = []
    for one in _plan(servers, load, folder):
        done = read_pass(one.path, one.key, (one.concurrency, one.number))
        if done is not None and done.clean:
            one.item.passes.setdefault(one.concurrency, []).append(done)
        else:
            todo.append(one)
    if only_read:
        return
    with progress("bench", len(todo) * len(load.talks), "conversations") as advance:
        for one in todo:
            item = one.item
            if item.lost:
                advance(len(load.talks), f"{item.facts.name} is lost")
                continue
            note = f"{item.facts.name}, concurrency {one.concurrency}, pass {one.number + 1}"
            noted = _noted(advance, note)
            try:
                found = await run_pass(item.server, load, item.facts, one.key, one.concurrency, one.number, noted)
            except ServerLostError as error:
                item.lost = str(error)
                print(f"note: {error}; it is left out", file=sys.stderr)
                continue
            one.path.parent.mkdir(parents=True, exist_ok=True)
            write_pass(one.path, found)
            item.passes.setdefault(one.concurrency, []).append(found)


@dataclass(frozen=True)
class _Planned:
    """A pass that is wanted, and where it is kept."""

    item: Measured
    concurrency: int
    number: int
    path: Path
    key: str


def _plan(servers: Sequence[Measured], load: Load, folder: Path) -> list[_Planned]:
    found = []
    for concurrency in load.cfg.concurrency:
        for number in range(load.cfg.passes):
            for item in servers if number % 2 == 0 else servers[::-1]:
                api = "" if item.server.api is None else item.server.api.name
                key = digest_json([load.digest, item.facts.settings, api])
                name = f"{item.tag}-c{concurrency}-p{number}.json"
                found.append(_Planned(item, concurrency, number, folder / name, key))
    return found


def _noted(advance: Callable[..., None], note: str) -> Callable[..., None]:
    return lambda count: advance(count, note)


def make_result(servers: Sequence[Measured], load: Load) -> BenchResult:
    """Rows of all that was measured, by concurrency."""
    baseline = next((item for item in servers if item.baseline), None)
    rows: list[Row] = []
    for concurrency in load.cfg.concurrency:
        for item in servers:
            others = None if baseline is None or item is baseline else baseline.passes.get(concurrency, [])
            passes = sorted(item.passes.get(concurrency, []), key=lambda one: one.number)
            lost = item.lost if len(passes) < load.cfg.passes else ""
            rows.append(
                make_row(
                    item.facts,
                    item.server.url,
                    item.baseline,
                    concurrency,
                    passes,
                    lost,
                    others,
                    load.cfg,
                    load.reference,
                )
            )
    settings = load.cfg.model_dump(mode="json", exclude={"sets"})
    counts = Counter(talk.set_name for talk in load.talks)
    name = load.target.contract_name
    return BenchResult(name, tuple(rows), load.left_out, settings, dict(sorted(counts.items())))


def write_answers(path: Path, item: Measured) -> None:
    """The answers of a server's last pass, one a line: `id` (set/conversation), `turn`, `text`, `answer_ids`."""
    passes = [one for found in item.passes.values() for one in found]
    lines = []
    for request in passes[-1].requests if passes else ():
        ids = {} if request.ids is None else {"answer_ids": list(request.ids)}
        line = {"id": request.talk, "turn": request.turn, "prompt_digest": request.prompt, "finish": request.finish}
        lines.append(json.dumps({**line, "text": request.text, **ids}, ensure_ascii=False))
    write_text_atomic(path, "".join(f"{line}\n" for line in sorted(lines)))


def _api_key(name: str) -> str | None:
    key = os.environ.get(name)
    if key is not None and not (key.isascii() and key.isprintable()):
        message = "holds other than printable ASCII letters, which cannot be sent"
        raise problem_error(name, "server.api_key", message, f"correct {name}")
    return key

"""`eagle3 serve sweep`: one server after the other, each waited for, measured and ended; a row that fails is told."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.config import BenchConfig, SweepConfig
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import only_writer, refuse_url, write_json_atomic
from eagle3.serve.bench.prompts import Load, make_load
from eagle3.serve.bench.run import Measured, client, make_server, measure, open_servers
from eagle3.serve.launch import ServerProcess, start_server
from eagle3.serve.launch.ports import port_fault
from eagle3.serve.sweep.result import SweepResult, SweepRow, make_sweep_result
from eagle3.serve.sweep.row_file import ROW, RowFile, changed_problem, read_row, row_key, write_row
from eagle3.serve.sweep.settings import Setting, make_settings
from eagle3.serve.wait import Ready, wait_until_ready
from eagle3.serve.wait.show import shown_progress
from eagle3.target.answer_servers.api import APIS

LOCK, ROWS, RESULT, LOG, PASSES = "sweep.lock", "rows", "sweep.json", "server.log", "passes"
_CAUSE_SECONDS = 10.0


@dataclass
class _Work:
    """A row at work."""

    setting: Setting
    folder: Path
    key: str
    kept: RowFile | None
    ready: Ready | None = None
    measured: Measured | None = None
    failed: str = ""
    problems: list[Problem] = field(default_factory=list)


def run_sweep(cfg: SweepConfig) -> SweepResult:
    """Measures every row that is not there yet, and writes `sweep.json` into `cfg.output`.

    Raises:
        ProblemsError: the commands, prompts or output cannot be used, or the port is taken; nothing was started.
    """
    refuse_url(cfg.output, "a sweep", "write to a local folder")
    settings, load = _prepared(cfg)
    folder = Path(cfg.output)
    with only_writer(folder, LOCK):
        work = [_work(setting, load, folder) for setting in settings]
        changed = [
            changed_problem(one.folder / ROW) for one in work if one.kept is not None and one.kept.key != one.key
        ]
        raise_problems(changed)
        todo = [one for one in work if not _finished(one, cfg, load)]
        if todo:
            _check_port(cfg)
        for number, one in enumerate(todo, 1):
            print(f"row {number} of {len(todo)}: {one.setting.name}", file=sys.stderr)
            _run_row(one, cfg, load)
        result = make_sweep_result(cfg, load, [_row(one) for one in work])
        write_json_atomic(folder / RESULT, result.to_dict())
    return result


def _prepared(cfg: SweepConfig) -> tuple[list[Setting], Load]:
    """Every problem of commands and prompts at once."""
    problems: list[Problem] = []
    settings: list[Setting] = []
    load: Load | None = None
    try:
        settings = make_settings(cfg)
    except ProblemsError as error:
        problems += error.problems
    try:
        load = make_load(cfg.load, cfg.rendered_for)
    except ProblemsError as error:
        problems += error.problems
    raise_problems(problems)
    assert load is not None
    return settings, load


def _check_port(cfg: SweepConfig) -> None:
    fault = port_fault(cfg.launch.host, cfg.launch.port)
    if fault is not None:
        where = f"{cfg.launch.host}:{cfg.launch.port}"
        fix = "end what listens there (ss -ltnp shows it), or set another launch.port"
        raise problem_error(where, "launch.port_in_use", f"cannot be listened on: {fault}", fix)


def _work(setting: Setting, load: Load, folder: Path) -> _Work:
    place = folder / ROWS / setting.folder
    return _Work(setting, place, row_key(setting, load), read_row(place / ROW))


def _bench(cfg: SweepConfig, one: _Work) -> BenchConfig:
    url = one.setting.command.url
    return BenchConfig(
        target=cfg.rendered_for, urls=[url], load=cfg.load, output=str(one.folder), api="sglang", model=cfg.model
    )


def _finished(one: _Work, cfg: SweepConfig, load: Load) -> bool:
    """Whether an earlier run measured all of it; its passes are read then."""
    if one.kept is None:
        return False

    async def read() -> Measured:
        async with client(None, 1.0) as http:
            server = make_server(one.setting.command.url, _bench(cfg, one), http)
            server.api = APIS["sglang"]
            item = Measured(server, one.kept.facts, not one.setting.steps, tag="row")  # type: ignore[union-attr]
            await measure([item], load, one.folder / PASSES, only_read=True)
            return item

    item = asyncio.run(read())
    if any(len(item.passes.get(concurrency, [])) < cfg.load.passes for concurrency in cfg.load.concurrency):
        return False
    one.measured = item
    return True


def _run_row(one: _Work, cfg: SweepConfig, load: Load) -> None:
    """Starts, waits, measures, ends; whatever goes wrong with this server is the row's failure, and its port is free
    afterwards."""
    try:
        with start_server(one.setting.command, one.folder / LOG) as server:
            with shown_progress() as show:
                one.ready = wait_until_ready(
                    one.setting.command.url, process=server, timeout=cfg.start_timeout_seconds, on_progress=show
                )
            print(f"ready after {one.ready.seconds:.0f} s", file=sys.stderr)
            asyncio.run(_measure(one, cfg, load))
            if one.measured is not None and one.measured.lost:
                one.measured.lost = _with_cause(one.measured.lost, server)
    except ProblemsError as error:
        if any(item.kind.startswith("disk.") for item in error.problems):
            raise  # of our own disk: every further server would be started for nothing
        one.failed = "; ".join(f"[{item.kind}] {item.message}" for item in error.problems)
        one.problems = list(error.problems)
        print(f"note: {one.setting.name} failed: {one.failed}", file=sys.stderr)


async def _measure(one: _Work, cfg: SweepConfig, load: Load) -> None:
    bench = _bench(cfg, one)
    async with client(None, cfg.load.timeout_seconds) as http:
        server = make_server(one.setting.command.url, bench, http)
        [item] = await open_servers([server], load, bench, last_is_baseline=not one.setting.steps)
        item.tag = "row"
        _check_settings(one.setting, item)
        one.measured = item
        await measure([item], load, one.folder / PASSES)
    if not item.lost and one.ready is not None:
        write_row(one.folder / ROW, RowFile(one.key, item.facts, one.ready.seconds, one.ready.warnings))


def _check_settings(setting: Setting, item: Measured) -> None:
    """The server may have taken other numbers than it was given.

    Raises:
        ProblemsError: kind `sweep.other_settings`.
    """
    facts = item.facts
    if not setting.steps or facts.steps is None:
        return
    served = (facts.steps, facts.topk, facts.draft_tokens)
    wanted = (setting.steps, setting.topk, setting.draft_tokens)
    if served != wanted:
        message = f"serves steps, topk, draft tokens {served}, was started with {wanted}"
        raise problem_error(item.server.url, "sweep.other_settings", message, "see its log for why it changed them")


def _with_cause(lost: str, server: ServerProcess) -> str:
    """What the log says of a server that went away while it was measured."""
    try:
        wait_until_ready(server.url, process=server, timeout=_CAUSE_SECONDS)
    except ProblemsError as error:
        return f"{lost}; {'; '.join(f'[{item.kind}] {item.message}' for item in error.problems)}"
    return lost


def _row(one: _Work) -> SweepRow:
    ready = one.ready
    seconds = ready.seconds if ready is not None else one.kept.seconds_to_ready if one.kept is not None else None
    warnings = ready.warnings if ready is not None else one.kept.warnings if one.kept is not None else ()
    return SweepRow(
        one.setting, one.measured, one.failed, tuple(one.problems), seconds, warnings, str(one.folder / LOG)
    )

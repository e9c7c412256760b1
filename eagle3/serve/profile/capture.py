"""Takes a trace of a running SGLang while it decodes: warm-up, a pass without the profiler, then one with it."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from eagle3.config import ConversationsConfig, TargetConfig
from eagle3.data.conversations import load_conversations
from eagle3.errors import Eagle3Error, problem_error
from eagle3.files import explained_os_errors, readable
from eagle3.progress import progress
from eagle3.serve.profile.load import Load, Measured, Prompt, pooled
from eagle3.serve.profile.server import ProfiledServer, ServerFacts

PLAIN = (
    "the server renders no chat messages to tokens (/v1/tokenize), so the last message of each prompt was sent as "
    "plain text: acceptance may differ from chat's; --target gives the target whose template renders them"
)
MOST_PROMPTS = 256
"""They are sent in turn, over and over."""
_POLL = 0.5
_MORE = 3
"""Forward passes to trace beyond the cycles that are wanted: the first and the last are no whole cycle."""


@dataclass(frozen=True)
class CaptureOptions:
    """How to trace.

    Attributes:
        output: folder that gets the traces, in a folder of this run's own; the server writes them.
        cycles: forward passes to trace.
        requests: of the pass without the profiler.
        with_stack: Python frames too, which makes the CPU's time much longer.
        timeout: seconds until the traces must be there.
        target: folder or hub id whose tokenizer renders the prompts; None: the server does.
    """

    url: str
    prompts: Path
    output: Path
    concurrency: int = 1
    cycles: int = 50
    requests: int = 8
    max_new_tokens: int = 256
    with_stack: bool = False
    timeout: float = 300.0
    api_key: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class Captured:
    """
    Attributes:
        traces: files of the ranks.
        measured: without the profiler.
    """

    traces: list[Path]
    facts: ServerFacts
    measured: Measured | None
    notes: list[str] = field(default_factory=list)


def capture(options: CaptureOptions, transport: httpx.BaseTransport | None = None) -> Captured:
    """Traces a server's decode cycles; whatever it writes stays in `options.output`.

    Raises:
        ProblemsError: the prompts cannot be read (`conversations.*`) or rendered (`target.*`, `chat.*`); kinds
            `server.*` and `profile.*`.
    """
    prompts = load_conversations(ConversationsConfig(path=str(options.prompts), limit=MOST_PROMPTS))[0]
    asked = [one.messages if one.prompt_only else one.messages[:-1] for one in prompts]
    sent = None if options.target is None else _rendered_here(options.target, asked)
    notes: list[str] = []
    with ProfiledServer(options.url, options.api_key, transport=transport) as server:
        facts = server.facts()
        sent = _rendered(server, asked) if sent is None else sent
        if isinstance(sent[0], str):
            notes.append(PLAIN)
        folder = _own_folder(options.output)  # before minutes of measuring
        try:
            measured = _untraced(server, sent, options)
        except BaseException:  # Ctrl-C too: nothing was traced; raised again
            folder.rmdir()
            raise
        if measured is None:
            notes.append("no answer took a verify without the profiler: prompts whose answers are one token long")
        files = _traced(server, sent, options, folder, facts)
        if not files:
            raise _no_trace(folder, options, measured)
    if facts.replicas > 1:
        notes.append(f"of {facts.replicas} data parallel replicas the first was traced")
        files = [path for path in files if "-DP-0" in path.name]
    return Captured(files, facts, measured, notes)


def _rendered(server: ProfiledServer, prompts: Sequence[list[dict[str, Any]]]) -> list[Prompt]:
    """Each prompt as the server's template renders it, or all as plain text where it cannot."""
    rendered: list[Prompt] = []
    for messages in prompts:
        ids = server.token_ids(messages)
        if ids is None:
            return [str(messages[-1].get("content")) for messages in prompts]
        rendered.append(ids)
    return rendered


def _rendered_here(target: str, prompts: Sequence[list[dict[str, Any]]]) -> list[Prompt]:
    """Each prompt as the target's own template renders it."""
    from eagle3.data.chat import load_tokenizer, render_prompt  # loads Transformers, which nothing else here needs
    from eagle3.target.resolve import find_target

    tokenizer = load_tokenizer(str(find_target(TargetConfig(path=target), weights=False).folder))
    return [render_prompt(tokenizer, messages, where=f"prompt {place}") for place, messages in enumerate(prompts)]


def _untraced(server: ProfiledServer, prompts: list[Prompt], options: CaptureOptions) -> Measured | None:
    """Answers in two goes, the first of which warms the server up and is not counted."""
    for counted, requests in ((False, options.concurrency), (True, max(options.requests, options.concurrency))):
        load = Load(server, prompts, options.concurrency, options.max_new_tokens, requests)
        with progress("without the profiler" if counted else "warm-up", requests, "answers") as advance, load:
            load.join(advance)
        load.check()
    return pooled(load.answers)


def _own_folder(output: Path) -> Path:
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    folder = output.absolute() / f"trace-{name}"
    with explained_os_errors(folder):
        folder.mkdir(parents=True)
    return folder


def _traced(
    server: ProfiledServer, prompts: list[Prompt], options: CaptureOptions, folder: Path, facts: ServerFacts
) -> list[Path]:
    """Starts the profiler while answers are going, which stops by itself, and waits for what it writes."""
    request = {
        "output_dir": str(folder),
        "num_steps": options.cycles + _MORE,
        "activities": ["CPU"] if facts.device == "cpu" else ["CPU", "GPU"],
        "with_stack": options.with_stack,
        "record_shapes": False,
        "profile_id": "profile",
    }
    deadline = time.monotonic() + options.timeout
    with Load(server, prompts, options.concurrency, options.max_new_tokens) as load:
        load.all_going(options.timeout)
        load.check()
        server.start_profile(request)
        done = False
        try:
            with progress("traced", facts.ranks, "traces written") as advance:
                files = _wait_for(folder, facts.ranks, deadline, load)
                advance(len(files))
            done = len(files) >= facts.ranks
        finally:
            if not done and server.stop_profile():
                files = _wait_for(folder, facts.ranks, time.monotonic() + 60, load)
    return files


def _wait_for(folder: Path, count: int, deadline: float, load: Load) -> list[Path]:
    """The whole traces in a folder, as soon as there are `count`; those that are there at the deadline."""
    sizes: dict[Path, int] = {}
    whole: set[Path] = set()
    while True:
        found = {path: path.stat().st_size for path in folder.glob("*.trace.json*") if path.suffix in (".gz", ".json")}
        whole |= {path for path, size in found.items() if sizes.get(path) == size and path not in whole and _ends(path)}
        if len(whole) >= count or time.monotonic() > deadline:
            return sorted(whole)
        load.check()
        sizes = found
        time.sleep(_POLL)


def _ends(path: Path) -> bool:
    """Whether a trace is written to its end.

    Raises:
        ProblemsError: kind `file.unreadable`; it may not be read, say.
    """
    with readable(path):
        if path.suffix != ".gz":
            return path.read_bytes()[-64:].rstrip().endswith(b"}")
        try:
            with gzip.open(path) as file:
                while file.read(1 << 20):
                    pass
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return False
        return True


def _no_trace(folder: Path, options: CaptureOptions, measured: Measured | None) -> Eagle3Error:
    """What was measured without the profiler is said, so that it is not lost."""
    message = f"wrote no trace to {folder} within {options.timeout:g} s"
    if measured is not None:
        message += (
            f". Without the profiler a cycle takes {measured.cycle_ms:.3f} ms at acceptance length "
            f"{measured.acceptance_length:.3f}, estimated from what it says of {measured.requests} answers"
        )
    fix = (
        "see its log. If it runs on another machine, the trace is there: copy it here and pass --trace; if it was "
        "still writing, give it longer with --timeout; if SGLANG_PROFILE_V2 is set for it, start it without"
    )
    return problem_error(options.url, "profile.no_trace", message, fix)

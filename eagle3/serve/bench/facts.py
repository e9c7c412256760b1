"""What a server says of itself before and after it is measured. Nothing here makes it generate a token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from eagle3.serve.bench.counters import Counters, read_counters
from eagle3.target.answer_servers.server import FaultyError, Server, UnavailableError

_FLUSH_SECONDS = 5.0
_PAUSE = 0.1
_MOST_DRAFTS = 10_000
"""More than any server drafts: such a number says nothing."""


@dataclass(frozen=True)
class Facts:
    """A server's settings, as far as it says them.

    Attributes:
        engine: `sglang`, or `openai` for any other.
        speculates: None where it does not say.
        steps, topk, draft_tokens: of speculative decoding.
        context_length: most tokens of prompt and answer.
        most_running: requests that it decodes together at most, in all its schedulers.
        instance: changes when it is started anew; None where nothing tells.
        cuda_graphs: None where it does not say.
    """

    engine: str
    version: str | None = None
    speculates: bool | None = None
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    context_length: int | None = None
    most_running: int | None = None
    instance: str | None = None
    cuda_graphs: bool | None = None

    @property
    def name(self) -> str:
        """For people."""
        if self.speculates is False:
            return "no drafter"
        if self.steps is None:
            return "unknown drafter" if self.speculates else "unknown"
        tree = "" if self.topk in (None, 1) else f", topk {self.topk}, {self.draft_tokens} draft tokens"
        return f"{self.steps} step{'' if self.steps == 1 else 's'}{tree}"

    @property
    def settings(self) -> dict[str, Any]:
        """What a measurement depends on; not which process it is."""
        names = ("engine", "version", "speculates", "steps", "topk", "draft_tokens", "context_length", "cuda_graphs")
        return {name: getattr(self, name) for name in names}


async def look(server: Server) -> Facts:
    """The server's settings.

    Raises:
        UnavailableError, FaultyError, LockedOutError: as `Server.fetch`.
    """
    if server.api is not None and server.api.name == "sglang":
        return sglang_facts(await server_info(server))
    status, value = await server.fetch("GET", "/server_info")  # SGLang, asked by an OpenAI route
    if status == 200 and isinstance(value, dict) and "internal_states" in value:
        return sglang_facts(value)
    try:
        status, value = await server.fetch("GET", "/version")
    except FaultyError:
        status, value = 404, None
    version = value.get("version") if status == 200 and isinstance(value, dict) else None
    return Facts("openai", version if isinstance(version, str) else None)


async def server_info(server: Server) -> Mapping[str, Any]:
    """SGLang's, under its older name where need be; empty where it has none."""
    for path in ("/server_info", "/get_server_info"):
        status, value = await server.fetch("GET", path)
        if status == 200 and isinstance(value, dict):
            return value
    return {}


def sglang_facts(info: Mapping[str, Any]) -> Facts:
    """What SGLang's `/server_info` says."""
    states = info.get("internal_states")
    states = [item for item in states if isinstance(item, dict)] if isinstance(states, list) else []
    speculates = None if "speculative_algorithm" not in info else bool(info["speculative_algorithm"])
    running = [item["effective_max_running_requests_per_dp"] for item in states
               if _count(item.get("effective_max_running_requests_per_dp"))]  # fmt: skip
    graphs_off = info.get("disable_cuda_graph")
    # The seed is drawn at each start, unless it was given; then nothing tells two starts apart.
    seed = info.get("random_seed")
    return Facts(
        engine="sglang",
        version=info.get("version") if isinstance(info.get("version"), str) else None,
        speculates=speculates,
        steps=_count(info.get("speculative_num_steps"), _MOST_DRAFTS) if speculates else None,
        topk=_count(info.get("speculative_eagle_topk"), _MOST_DRAFTS) if speculates else None,
        draft_tokens=_count(info.get("speculative_num_draft_tokens"), _MOST_DRAFTS) if speculates else None,
        context_length=_count(info.get("context_length")) or _count(info.get("max_req_input_len")),
        most_running=sum(running) or _count(info.get("max_running_requests")),
        instance=None if seed is None else str(seed),
        cuda_graphs=None if not isinstance(graphs_off, bool) else not graphs_off,
    )


async def counters(server: Server) -> Counters:
    """From `/metrics`; all unknown where there is none."""
    try:
        reply = await server.http.get(server.url + "/metrics", follow_redirects=True)
    except httpx.HTTPError:
        return Counters()
    return read_counters(reply.text) if reply.status_code == 200 else Counters()


async def in_flight(server: Server) -> int | None:
    """Requests that SGLang has, running or waiting; None where it does not say."""
    for path in ("/v1/loads", "/get_load"):
        try:
            status, value = await server.fetch("GET", path)
        except (FaultyError, UnavailableError):
            return None
        if status == 200:
            return _in_flight(value)
    return None


def _in_flight(value: Any) -> int | None:
    rows = value.get("loads") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        return None
    total = 0
    for row in rows:
        if not isinstance(row, dict):
            return None
        found = row.get("num_total_reqs", row.get("num_reqs"))
        parts = [row.get("num_running_reqs"), row.get("num_waiting_reqs", 0)] if found is None else [found]
        if not all(type(part) is int and part >= 0 for part in parts):
            return None
        total += sum(parts)
    return total


async def flush(server: Server) -> bool:
    """Empties the prefix cache; a server that is still about to end a request refuses for a moment.

    Returns:
        Whether it was emptied.
    """
    paths = ("/flush_cache", "/reset_prefix_cache")
    waited = 0.0
    while waited < _FLUSH_SECONDS:
        refused = False
        for path in paths:
            try:
                reply = await server.http.post(server.url + path)
            except httpx.HTTPError:
                return False
            if reply.status_code == 200:
                return True
            refused = refused or reply.status_code == 400
        if not refused:
            return False
        await asyncio.sleep(_PAUSE)
        waited += _PAUSE
    return False


def _count(value: Any, most: int | None = None) -> int | None:
    return value if type(value) is int and value > 0 and (most is None or value <= most) else None

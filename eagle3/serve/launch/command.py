"""The command of a server: what is run, with which environment, and where it will listen."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchCommand:
    """A server to be started.

    Attributes:
        engine, version: what it was worked out for.
        argv: program and arguments.
        env: variables that are set besides the environment it is started in.
        host, port: where it listens.
        target: model that it serves.
        python: the Python that has the engine.
        has_drafter: whether it speculates.
        cuda_graphs: whether decoding is meant to run in CUDA graphs.
        passive_health: `/health` answers without generating.
        notes: what a person should know before starting it.
    """

    engine: str
    version: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    target: str
    python: str
    has_drafter: bool
    cuda_graphs: bool
    passive_health: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    def __str__(self) -> str:
        """One line for a POSIX shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, *map(shlex.quote, self.argv)])

    def to_dict(self) -> dict[str, object]:
        """As in docs/schemas/launch.schema.json."""
        return {
            "format": "eagle3-launch",
            "format_version": 1,
            "engine": self.engine,
            "engine_version": self.version,
            "argv": list(self.argv),
            "env": dict(self.env),
            "url": self.url,
            "shell": str(self),
            "has_drafter": self.has_drafter,
            "cuda_graphs": self.cuda_graphs,
            "notes": list(self.notes),
        }

    def render(self, as_json: bool = False) -> str:
        """What `eagle3 serve launch` prints: the command on one line, and above it the notes as shell comments."""
        if as_json:
            return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        return "\n".join([*(f"# {note}" for note in self.notes), str(self)])

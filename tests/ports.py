"""A port that nothing listens at."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free at the moment of asking."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

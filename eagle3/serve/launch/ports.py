"""Whether a port can be listened on."""

from __future__ import annotations

import socket
import time

_RETRY_SECONDS = 0.2


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket(_family(host)) as free:
        free.bind((_bare(host), 0))
        return int(free.getsockname()[1])


def port_fault(host: str, port: int) -> str | None:
    """Why a server could not listen there, in the system's words; None if it can.

    The port is taken as servers take it (SO_REUSEADDR): connections that are still closing do not count.
    """
    try:
        with socket.socket(_family(host)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((_bare(host), port))
            one.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def wait_until_free(host: str, port: int, seconds: float) -> str | None:
    """Waits until the port can be taken; what `port_fault` says if it cannot after so long."""
    deadline = time.monotonic() + seconds
    while (fault := port_fault(host, port)) is not None and time.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
    return fault


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bare(host: str) -> str:
    return host.strip("[]")

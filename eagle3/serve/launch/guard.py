"""Run as a script beside a server: ends its process group if whoever started it is gone. Standard library only.

Whoever starts the server holds the other end of this script's standard input. A line means that the server was ended in
an orderly way; the end of the stream without one means that its starter died, by whatever signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


def main(group: int, grace: float) -> None:
    """Waits for the starter's word or death."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the starter's group must not end the guard first
    if sys.stdin.buffer.readline():
        return
    end_group(group, grace)


def end_group(group: int, grace: float) -> None:
    """SIGTERM to the leader, which lets a server clear up; then SIGKILL to whatever is left of the group."""
    try:
        os.kill(group, signal.SIGTERM)
    except ProcessLookupError:
        grace = 0.0
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and _alive(group):
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

"""A server that was ready, until it ends."""

from __future__ import annotations

import time

from eagle3.errors import raise_problems
from eagle3.serve.launch.process import ServerProcess
from eagle3.serve.wait.causes import diagnose
from eagle3.serve.wait.lines import split_line
from eagle3.serve.wait.log_file import LogFile

_POLL_SECONDS = 0.5


def until_it_ends(process: ServerProcess) -> None:
    """Returns if it ends with exit code 0.

    Raises:
        ProblemsError: it died; the causes that its log names.
    """
    while (code := process.poll()) is None:
        time.sleep(_POLL_SECONDS)
    if code == 0:
        return
    log = LogFile(process.log)
    try:
        lines = [split_line(line).text for line in log.new_lines()]
    finally:
        log.close()
    raise_problems(diagnose(lines, str(process.log), code, "serving"), "the server died")

"""Which version of the engine a Python has, asked without importing the engine."""

from __future__ import annotations

import subprocess

from eagle3.errors import Problem
from eagle3.serve.launch.command import LaunchCommand
from eagle3.wiring.version import Version

_SECONDS = 60
_ASK = (
    "import importlib.metadata as m, sys\n"
    "try: print(m.version(sys.argv[1]))\n"
    "except m.PackageNotFoundError: print('')\n"
)


def check_installed(command: LaunchCommand) -> list[Problem]:
    """The Python must have the version that the command was made for; kinds `launch.python`, `launch.other_version`."""
    where = command.python
    try:
        asked = subprocess.run(
            [command.python, "-c", _ASK, command.engine], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Problem(where, "launch.python", f"does not run: {error}", "give the Python that has the engine")]
    installed = asked.stdout.strip().rpartition("\n")[2]
    if asked.returncode != 0:
        message = f"is no Python: asked for its packages, it ended with {asked.returncode}"
        return [Problem(where, "launch.python", message, "give the Python that has the engine")]
    if not installed:
        fix = f"install {command.engine} {command.version} there, or give the Python that has it"
        return [Problem(where, "launch.python", f"has no {command.engine}", fix)]
    if Version(installed) != Version(command.version):
        message = f"has {command.engine} {installed}, the command was made for {command.version}"
        fix = (
            f"set engine_version={installed}, and export the drafter for it: layer ids and arguments differ by version"
        )
        return [Problem(where, "launch.other_version", message, fix)]
    return []

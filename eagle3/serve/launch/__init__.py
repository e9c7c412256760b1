"""`eagle3 serve launch`: a server's exact command by engine and version, its checks, and the running process.

`build_command` makes the command (and refuses what would fail or be slow), `start_server` runs it in a process group of
its own that never outlives us. Imports no torch and no engine.
"""

from eagle3.serve.launch.build import build_command
from eagle3.serve.launch.command import LaunchCommand
from eagle3.serve.launch.ports import free_port
from eagle3.serve.launch.process import ServerProcess, start_server

__all__ = ["LaunchCommand", "ServerProcess", "build_command", "free_port", "start_server"]

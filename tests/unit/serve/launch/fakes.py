"""Servers of ten lines in place of an engine. Imports no torch: processes that must start quickly use it."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3.serve.launch import LaunchCommand, free_port

VERSION = "0.5.23"

SERVER = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, stubborn, pids = int(sys.argv[1]), sys.argv[2] == "stubborn", sys.argv[3]
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"model_path": "target"}')
    def log_message(self, *args): pass
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
with open(pids, "w") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
print("listening", flush=True)
server.serve_forever()
"""
"""Listens, and has a child that ignores SIGTERM; `stubborn`, it ignores it too."""


def fake_command(folder: Path, port: int | None = None, how: str = "polite", script: str = SERVER) -> LaunchCommand:
    """Runs a script in place of an engine; it writes its process ids to `folder/pids`."""
    (folder / "server.py").write_text(script, encoding="utf-8")
    port = free_port() if port is None else port
    return LaunchCommand(
        engine="sglang",
        version=VERSION,
        argv=(sys.executable, str(folder / "server.py"), str(port), how, str(folder / "pids")),
        env={"PYTHONUNBUFFERED": "1"},
        host="127.0.0.1",
        port=port,
        target="target",
        python=sys.executable,
        has_drafter=True,
        cuda_graphs=True,
        passive_health=True,
    )

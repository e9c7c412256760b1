"""A process in place of SGLang: takes its arguments, serves `FakeSpec`, and dies where the environment says.

FAKE_SWEEP is JSON: `starts` (a file that gets a line for each start), `at_load` and `in_work` (steps whose server dies
there), `deaf` (steps whose drafter is never accepted), `other` (steps that it changes on its own).
"""

from __future__ import annotations

import json
import os
import sys
import threading

from tests.unit.serve.bench.fake_spec import FakeSpec

PATTERN = (4, 0, 2, 1, 3, 0, 5, 1)
"""Drafts that would be accepted, were there no end of them."""


def argument(name: str, default: str = "0") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    how = json.loads(os.environ["FAKE_SWEEP"])
    steps = int(argument("--speculative-num-steps"))
    with open(how["starts"], "a") as file:
        file.write(f"{steps} {os.getpid()}\n")
    print("server_args=ServerArgs(...)", flush=True)
    if steps in how.get("at_load", []):
        print("FileNotFoundError: [Errno 2] No such file or directory: 'model-00007.safetensors'", flush=True)
        sys.exit(1)
    deaf = steps in how.get("deaf", [])
    fake = FakeSpec(
        steps=steps + (steps in how.get("other", [])),
        pattern=(0,) if deaf else tuple(min(item, steps) for item in PATTERN),
        delay=0.004 + 0.003 * steps,
        length=40,
        model=argument("--model-path"),
        fault=lambda number: "exit" if steps in how.get("in_work", []) and number == 3 else None,
    )
    with fake.running(int(argument("--port"))):
        print("The server is fired up and ready to roll!", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

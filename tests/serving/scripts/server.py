"""The real HTTP server on a CPU: takes the arguments of `python -m sglang.launch_server`."""

import sys

from sglang.srt.runtime_context import override_platform

override_platform(has_amx=True).install()  # keeps the one CPU attention backend that can speculate with EAGLE

ON_CPU = ["--device", "cpu", "--attention-backend", "intel_amx"]
SMALL = ["--mem-fraction-static", "0.3", "--max-total-tokens", "4096"]

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*ON_CPU, *SMALL, *sys.argv[1:]]))

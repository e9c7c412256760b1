"""The real HTTP server on a CPU: takes the arguments of `python -m sglang.launch_server`.

`--text-only`, last, loads no processor for pictures; SGLang has that as an argument of its engine only."""

import sys

import on_cpu  # noqa: F401

ON_CPU = ["--device", "cpu", "--attention-backend", "intel_amx"]
SMALL = ["--mem-fraction-static", "0.3", "--max-total-tokens", "4096"]

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    text_only = sys.argv[-1] == "--text-only"
    arguments = prepare_server_args([*ON_CPU, *SMALL, *sys.argv[1 : -1 if text_only else None]])
    if text_only:
        arguments.enable_multimodal = False
    run_server(arguments)

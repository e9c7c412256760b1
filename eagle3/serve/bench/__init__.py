"""Speed and acceptance of running servers, measured on real prompts without disturbing them; see docs/bench.md."""

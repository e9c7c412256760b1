"""Import this before anything else of SGLang in a script that starts an engine or a server."""

from __future__ import annotations

import multiprocessing

from sglang.srt.runtime_context import override_platform

# SGLang's own override: it keeps the one CPU attention backend that can speculate with EAGLE.
override_platform(has_amx=True).install()

# SGLang spawns its processes, each of which then imports everything again. Forked from a clean process that has
# imported it once, they start in a third of the time.
multiprocessing.set_start_method("forkserver", force=True)
multiprocessing.set_forkserver_preload(["sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"])
multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[assignment]

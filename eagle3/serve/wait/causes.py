"""Why a server died, from its log.

The patterns are what PyTorch, NCCL, Transformers, uvicorn and SGLang say; SGLang's were read in 0.5.23
(`sglang/srt/model_executor/pool_configurator.py`, `model_loader/loader.py`, `models/registry.py`,
`configs/model_config.py`, `utils/network.py`, `utils/watchdog.py`, `entrypoints/engine.py`, `managers/scheduler.py`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.errors import Problem

FATAL = re.compile(
    r"Scheduler hit an exception|SIGQUIT received|Initialization failed\. warmup error|scheduler died during init"
    r"|crashed with exit code|error while attempting to bind on address|\berror: (?:unrecognized arguments|argument )"
    r"|error: the following arguments are required|Capture cuda graph failed|^Killed$|^Segmentation fault"
)
"""A line after which a server never becomes ready, even if its process lives on."""
STOPPED = re.compile(r"SIGTERM received|kill_process_tree called")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?$")
_FOLLOWS = re.compile(r"EOFError|scheduler died during init|SystemExit|KeyboardInterrupt|BrokenPipeError")
_MOST = 3
_LONGEST = 400


@dataclass(frozen=True)
class Cause:
    """A pattern, what it means and what to do."""

    kind: str
    pattern: re.Pattern[str]
    means: str
    fix: str


def _cause(kind: str, pattern: str, means: str, fix: str) -> Cause:
    return Cause(f"start.{kind}", re.compile(pattern), means, fix)


_RAISED = r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): .*"
CAUSES = (
    _cause("arguments", r"\berror: (?:unrecognized arguments|argument |the following arguments).*",
           "it does not take these arguments", "give the arguments of its version: `eagle3 serve launch` knows them"),
    _cause("kv_cache", r"Not enough memory\. Please try to increase --mem-fraction-static.*",
           "no GPU memory is left for the key/value cache beside the weights",
           "raise memory_fraction, share the model out to more GPUs (tp), or serve a shorter context"),
    _cause("out_of_memory", r"(?:OutOfMemoryError|RuntimeError|AcceleratorError).*out of memory.*|CUDA out of memory.*",
           "GPU memory ran out",
           "lower memory_fraction (it leaves more for graphs and activations) or cuda_graph_max_batch, or raise tp; "
           "nvidia-smi shows who else uses the GPU"),
    _cause("port_in_use",
           r"error while attempting to bind on address.*|address already in use.*|EADDRINUSE.*"
           r"|is not available in \d+ seconds.*|failed to bind to .*",
           "a port that it needs is taken",
           "end what listens there (ss -ltnp shows it), or set another port or nccl_port"),
    _cause("nccl", r"(?:DistBackendError|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError"
           r"|NCCL error|Watchdog caught collective operation timeout).*",
           "the GPUs cannot talk to each other", "start it with nccl=[debug] and read what NCCL says; where direct "
           "copies hang, nccl=[no_p2p]; on one host, nccl=[one_host]"),
    _cause("gpu", r"(?:CUDA driver version is insufficient|no CUDA-capable device|no kernel image is available"
           r"|Found no NVIDIA driver|invalid device ordinal).*",
           "it cannot use the GPU",
           "check nvidia-smi, CUDA_VISIBLE_DEVICES, tp, and that PyTorch was built for this card"),
    _cause("gpu_fault", r"(?:an illegal memory access was encountered|device-side assert triggered).*",
           "a GPU kernel failed, often an index out of range such as a draft vocab with absolute ids",
           "run `eagle3 wiring check` on the checkpoint; start it with CUDA_LAUNCH_BLOCKING=1 to see which kernel"),
    _cause("no_weights", r"Cannot find any model weights.*", "a folder has no weights", "fetch the weights"),
    _cause("architecture",
           r"Model architectures .*|Unrecognized model in .*|.*does not recognize this architecture.*"
           r"|Unrecognized configuration class.*|Cannot find model module\..*",
           "it does not know the model's class",
           "serve with a version that has it; check `architectures` in config.json"),
    _cause("context", r"ValueError: .*greater than the derived context_length.*",
           "more context is to be served than config.json allows",
           "export the drafter with the target's context, or set context_length; knowingly: allow_longer_context=true"),
    _cause("missing_file",
           r"^(?:[\w.]*)(?:FileNotFoundError|LocalEntryNotFoundError|HFValidationError|OSError|RepositoryNotFoundError"
           r"|EntryNotFoundError): .*",
           "a file or a model is not where it looked",
           "check the paths of target and checkpoint on the serving machine"),
    _cause("shape", r"^(?:AssertionError: .*|RuntimeError: .*(?:size mismatch|must match the size of tensor).*"
           r"|RuntimeError: The size of tensor.*)",
           "a tensor has another shape than config.json says",
           "run `eagle3 wiring check` on the checkpoint, and check tp"),
    _cause("assertion", r"^AssertionError$", "an assertion of the engine failed",
           "read the traceback in the log; run `eagle3 wiring check` on the checkpoint"),
    _cause("import", r"^(?:ModuleNotFoundError|ImportError): .*", "a package is missing or does not fit",
           "install the engine's own requirements in its environment"),
    _cause("killed", r"exit code:? -9\b.*|^Killed$",
           "the system killed a process of it, most often since main memory ran out",
           "dmesg -T | grep -i oom tells; load fewer processes at once, or use a machine with more memory"),
)  # fmt: skip


def diagnose(lines: Sequence[str], where: str, code: int | None, phase: str) -> list[Problem]:
    """Problems that name the causes, at least one.

    Args:
        lines: of the log, without time and rank, oldest first.
        where: the log file, or the URL.
        code: exit code of the process, negative for a signal; None where nobody knows it.
        phase: what it was doing, in words.
    """
    ended = _ended(code)
    found: dict[str, Problem] = {}
    for cause in CAUSES:
        if cause.kind in ("start.assertion",) and "start.shape" in found:
            continue
        said = next((match[0] for line in lines if (match := cause.pattern.search(line))), None)
        if said is not None:
            message = f"the server died while {phase}{ended}: {cause.means}. It says: {_short(said)}"
            found[cause.kind] = Problem(where, cause.kind, message, cause.fix)
    if found:
        return list(found.values())[:_MOST]
    return [_unknown(lines, where, code, phase, ended)]


def _unknown(lines: Sequence[str], where: str, code: int | None, phase: str, ended: str) -> Problem:
    raised = [line for line in lines if EXCEPTION.match(line) and not _FOLLOWS.search(line)]
    if raised:
        message = f"the server died while {phase}{ended}. It says: {_short(raised[-1])}"
        return Problem(where, "start.exception", message, "read the traceback in the log")
    if code == -signal.SIGKILL:
        message = f"the server was killed while {phase}{ended}: most often main memory ran out"
        return Problem(where, "start.killed", message, "dmesg -T | grep -i oom tells")
    if any(STOPPED.search(line) for line in lines) or code in (-signal.SIGTERM, -signal.SIGINT):
        return Problem(where, "start.stopped", f"somebody ended the server while {phase}{ended}", "start it again")
    last = next((line for line in reversed(lines) if line.strip()), "")
    said = f"Its last line: {_short(last)}" if last else "Its log is empty"
    return Problem(
        where, "start.exited", f"the server ended while {phase}{ended}, without a cause. {said}", "read its log"
    )


def _ended(code: int | None) -> str:
    if code is None:
        return ""
    if code < 0:
        try:
            return f" (ended by {signal.Signals(-code).name})"
        except ValueError:
            return f" (ended by signal {-code})"
    return f" (exit code {code})"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

"""What a running SGLang says of itself, held against what an extraction needs; and how to start one that fits.

Read in SGLang 0.5.23 (`sglang/srt/arg_groups/validation_hook.py`, `handle_aux_hidden_state_capture`;
`sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py`;
`sglang/srt/managers/scheduler_components/batch_result_processor.py`, `_append_prefill_hidden_states`):

- up to 0.5.16 an answer may hold the rows of another request that was prefilled with it;
- aux states without a drafter are new in 0.5.23; older versions capture them for a drafter only;
- the layer ids go where a drafter's would, so they follow the same convention; a negative one is refused;
- of a prompt that is prefilled in chunks only the last chunk's states are returned, and requests in flight together
  are chunked together, so chunking must be off;
- the last hidden states are kept beside the aux states, but not returned: `sglang_hook.py` adds them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.target.engines.sglang_client import FIRST_WITH_OWN_ROWS, SglangClient, mixes_up_rows
from eagle3.target.engines.sglang_hook import HOOK
from eagle3.target.resolve import TargetFiles
from eagle3.wiring.engines import boundaries_read, ids_to_write, newest_known
from eagle3.wiring.layers import LayerWiring, default_boundaries, describe_layers
from eagle3.wiring.version import Version

FIRST_WITHOUT_DRAFTER = "0.5.23"
_RECORDED = (
    "version", "model_path", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size", "dp_size",
    "return_aux_hidden_state_layer_ids",
)  # fmt: skip
_ANOTHER = "give the address of a server of the target that target.path names, or that target's path"


@dataclass(frozen=True)
class Served:
    """A server whose word is good.

    Attributes:
        layers_known: it names the layers that it captures. One with a drafter does not.
        start: how to start one that gives all that is needed.
        recorded: what it says of itself, for provenance; no secrets.
    """

    layers_known: bool
    start: str
    recorded: Mapping[str, Any]


def check_server(client: SglangClient, files: TargetFiles, wiring: LayerWiring, longest: int) -> Served:
    """Asks the server that is to give the aux states.

    Args:
        client: of the server.
        files: the target that it should serve.
        wiring: the layers that are wanted.
        longest: tokens of the longest sample.

    Raises:
        ProblemsError: everything that its own words rule out; kinds `server.*`, and `engine.*` for a version that is
            not known or that cannot capture these layers.
    """
    model, info = client.model_info(), client.server_info()
    family, version = files.facts.family, str(info.get("version"))
    problems = [*_common_problems(client.url, model, info, files, longest)]
    drafter = info.get("aux_hidden_state_capture") is None and info.get("speculative_algorithm") == "EAGLE3"
    start = ""
    try:
        ids = _ids(wiring, version, family)
        start = f"start it so, with eagle3 on its PYTHONPATH: {start_command(str(model['model_path']), ids)}"
        if not drafter:
            problems += _capture_problems(client.url, info, version, wiring, family, ids, start)
    except ProblemsError as error:
        problems += error.problems
    raise_problems(problems, f"{client.url} cannot be extracted from")
    return Served(not drafter, start, {key: info[key] for key in _RECORDED if key in info})


def check_last_states_server(client: SglangClient, files: TargetFiles, longest: int) -> None:
    """Asks the server that is to give the last hidden states.

    Raises:
        ProblemsError: kinds `server.*`.
    """
    model, info = client.model_info(), client.server_info()
    problems = [*_common_problems(client.url, model, info, files, longest)]
    if info.get("aux_hidden_state_capture") or info.get("speculative_algorithm"):
        message = "captures layers for a drafter, so it returns their states and not the last hidden states"
        fix = "start it with --enable-return-hidden-states --chunked-prefill-size -1, without a speculative algorithm"
        problems.append(Problem(client.url, "server.last_states", message, fix))
    raise_problems(problems, f"{client.url} cannot be extracted from")


def start_command(model_path: str, ids: Sequence[int]) -> str:
    """Of a server that returns the states of the layers that `ids` name, and the last hidden states beside them."""
    hook = json.dumps([{"target_modules": ["*logits_processor"], "hook_factory": HOOK}])
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model_path)} --enable-return-aux-hidden-states "
        f"--speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids {' '.join(map(str, ids))} "
        f"--chunked-prefill-size -1 --forward-hooks {shlex.quote(hook)}"
    )


def newest_start_command(files: TargetFiles, wiring: LayerWiring) -> str:
    """`start_command` for the newest known version.

    Raises:
        ProblemsError: kinds `engine.*`; it cannot capture these layers.
    """
    return start_command(str(files.folder), _ids(wiring, newest_known("sglang"), files.facts.family))


def _ids(wiring: LayerWiring, version: str, family: str) -> tuple[int, ...]:
    """The ids for this version, or for the newest known where this one needs a drafter to capture anything."""
    old = Version(version) < Version(FIRST_WITHOUT_DRAFTER)
    return ids_to_write(wiring, "sglang", newest_known("sglang") if old else version, family).ids


def _common_problems(
    url: str, model: Mapping[str, Any], info: Mapping[str, Any], files: TargetFiles, longest: int
) -> Iterator[Problem]:
    version = str(info.get("version"))
    if mixes_up_rows(version):
        message = (
            f"is SGLang {version}, whose answers may hold the states of another request that was prefilled at the same "
            "time: of as many tokens, so that nothing would show it"
        )
        yield Problem(url, "server.version", message, f"serve with SGLang {FIRST_WITH_OWN_ROWS} or newer")
    served, expected = model.get("model_type"), files.config.get("model_type")
    if served is not None and served != expected:
        message = f"serves {model['model_path']}, a {served}; target.path is a {expected}"
        yield Problem(url, "server.other_target", message, _ANOTHER)
    chunk = info.get("chunked_prefill_size")
    if isinstance(chunk, int) and chunk > 0:
        message = f"prefills in chunks of {chunk} tokens, and returns only the states of a prompt's last chunk"
        yield Problem(url, "server.chunked_prefill", message, "start it with --chunked-prefill-size -1")
    most = info.get("max_req_input_len")
    if isinstance(most, int) and most < longest:
        message = f"takes prompts of at most {most} tokens, the longest sample has {longest}"
        fix = f"start it with a larger --context-length and --max-total-tokens, or set data.max_length={most}"
        yield Problem(url, "server.context", message, fix)


def _capture_problems(
    url: str,
    info: Mapping[str, Any],
    version: str,
    wiring: LayerWiring,
    family: str,
    ids: Sequence[int],
    start: str,
) -> Iterator[Problem]:
    if min(ids) < 0:
        message = f"cannot be told to capture the embedding: without a drafter, SGLang refuses the id {min(ids)}"
        yield Problem(url, "server.embedding", message, "extract with another engine, or train without -1")
        return
    if info.get("aux_hidden_state_capture") != "eagle3":
        message = "captures no layers as EAGLE-3 does: it was started without --enable-return-aux-hidden-states"
        if Version(version) < Version(FIRST_WITHOUT_DRAFTER):
            start = f"serve with SGLang {FIRST_WITHOUT_DRAFTER} or newer, {version} does not know the option; {start}"
        yield Problem(url, "server.aux_states_off", message, start)
        return
    named, count = info.get("return_aux_hidden_state_layer_ids"), wiring.num_hidden_layers
    if named is None:
        found = tuple(sorted(set(default_boundaries(count))))
    else:
        found = boundaries_read(named, "sglang", version, family, count)
    if found != wiring.boundaries:
        layers = describe_layers([boundary - 1 for boundary in found])
        with_ids = "no layer ids" if named is None else f"layer ids {named}"
        message = (
            f"was started with {with_ids} and captures {layers}, expected {describe_layers(wiring.output_indices)}, "
            f"which for SGLang {version} are {list(ids)}"
        )
        yield Problem(url, "server.other_layers", message, start)

"""`eagle3 extract` with engine=sglang: a store from a running server.

Only the target's config, tokenizer, embedding, norm and head are read here; the rest of it where it is there and fits
in memory, once, for the check of the first states.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from eagle3.data.store import StoredSample
from eagle3.data.target_argmax import make_target_head
from eagle3.errors import problem_error
from eagle3.target.capture import stored_sample
from eagle3.target.engine_choice import choose_engine
from eagle3.target.engines.sglang import SglangEngine
from eagle3.target.engines.sglang_client import SglangClient
from eagle3.target.engines.sglang_server import Served, check_last_states_server, check_server
from eagle3.target.engines.transformers import TransformersEngine, load_model
from eagle3.target.head_tensors import has_all_weights, read_head_tensors
from eagle3.target.plan import ExtractPlan
from eagle3.target.selfcheck import pick_samples
from eagle3.target.served_check import check_served
from eagle3.target.write import Done, Write


def extract_served(plan: ExtractPlan, write: Write[Done]) -> Done:
    """Extracts what is lacking.

    Raises:
        ProblemsError: kinds `server.*`; whatever can be found out before the first byte is written, is. A server that
            dies half-way costs the shard in work; the same command goes on.
    """
    cfg, contract, files = plan.cfg, plan.contract, plan.files
    if cfg.last_hidden_states != "post_norm":
        message = "a server returns post-norm last hidden states only"
        raise problem_error("last_hidden_states", "server.pre_norm", message, "set last_hidden_states=post_norm")
    tensors = read_head_tensors(files, cfg.target)
    head = make_target_head(tensors, files.text_config, "post_norm")
    with ExitStack() as stack:
        engine, served = _connect(plan, stack)
        local = _local_target(plan)
        if not served.layers_known and local is None:
            message = "does not say which layers it captures, and the target's weights are not here to find out"
            raise problem_error(engine.client.url, "server.layers_unknown", message, served.start)
        few = [plan.samples[index] for index in pick_samples([tokens for _, tokens in plan.sample_tokens])]
        samples = {sample.id: sample.input_ids for sample in few}
        check_served(engine, contract, cfg.target.dtype, head, samples, served.start, local)
        other_states = None if local is None else local.neighbours
        told = {"server": served.recorded}
        return write(plan, tensors, lambda missing: _asked(plan, engine, missing), other_states, told)


def _connect(plan: ExtractPlan, stack: ExitStack) -> tuple[SglangEngine, Served]:
    """The engine, its servers asked; they are let go with `stack`."""
    server, contract = plan.cfg.server, plan.contract
    longest = max(tokens for _, tokens in plan.sample_tokens)
    client = stack.enter_context(_client(plan, server.url))
    served = check_server(client, plan.files, contract.wiring, longest)
    last_states = None
    if server.last_states_url is not None:
        last_states = stack.enter_context(_client(plan, server.last_states_url))
        check_last_states_server(last_states, plan.files, longest)
    engine = SglangEngine(
        client,
        contract.hidden_size,
        contract.wiring.num_aux,
        plan.layout.value_dtype,
        served.start,
        last_states,
        server.concurrency,
    )
    return engine, served


def _client(plan: ExtractPlan, url: str) -> SglangClient:
    server = plan.cfg.server
    return SglangClient(
        url,
        os.environ.get(server.api_key_env),
        api_key_hint=f"set {server.api_key_env}",
        timeout=server.timeout,
        attempts=server.attempts,
        connections=server.concurrency,
    )


def _local_target(plan: ExtractPlan) -> TransformersEngine | None:
    """The target in this process, if its weights are all here and fit in memory."""
    cfg, files = plan.cfg, plan.files
    if not cfg.server.check_target:
        return None
    if not has_all_weights(files.folder) or choose_engine(files, cfg.target) != "transformers":
        print(f"note: the states are not compared with {files.folder}: it is not whole, or too large", file=sys.stderr)
        return None
    return TransformersEngine(load_model(files, cfg.target), files.spec, plan.contract.wiring, "post_norm")


def _asked(plan: ExtractPlan, engine: SglangEngine, missing: Sequence[int]) -> Iterator[tuple[int, StoredSample]]:
    """A shard's samples, all asked for at once: the server and `server.concurrency` say how many run."""
    captures = engine.stream([plan.samples[index].input_ids for index in missing])
    for index, capture in zip(missing, captures, strict=True):
        yield index, stored_sample(plan.samples[index], capture, plan.layout.value_dtype)

"""`eagle3 extract`: the target's hidden states for conversations, as a store.

Everything that can be refused is refused before the first byte is written (`plan.py`, `selfcheck.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.config import ExtractConfig
from eagle3.data.chat import PrepareReport
from eagle3.data.chat.sample_file import Each
from eagle3.data.store import StoredSample
from eagle3.data.target_argmax import make_target_head, with_argmax
from eagle3.errors import raise_problems
from eagle3.target.capture import CaptureEngine, batches_by_length, capture_samples, stored_sample
from eagle3.target.engines.transformers import TransformersEngine, load_model
from eagle3.target.joint_copy import copy_jointly
from eagle3.target.plan import ExtractPlan, check_disk, check_resume, make_plan, process_problems, sharing_process
from eagle3.target.reuse import changes, copy_states, reusable
from eagle3.target.ring_extract import RingReport, check_ring, for_ring, plan_ring, write_ring
from eagle3.target.selfcheck import self_check
from eagle3.target.served_extract import extract_served
from eagle3.target.stream_extract import extract_streamed
from eagle3.target.stream_plan import begun_manifest, begun_settings, settle_sizes
from eagle3.target.stream_ring import extract_streamed_ring
from eagle3.target.write import Done, Write, write_store

_COPIED = "it has all of these states: they are copied, the target does not run"


@dataclass(frozen=True)
class ExtractReport:
    """What is in the store now.

    Attributes:
        output: its folder.
        samples, tokens, supervised_tokens: in the store.
        extracted: samples that this run added.
        prepared: what became of the conversations.
        lacking: what other processes have yet to do, a line each.
    """

    output: str
    samples: int
    tokens: int
    supervised_tokens: int
    extracted: int
    prepared: PrepareReport
    lacking: Sequence[str] = ()

    def render(self) -> str:
        counts = f"{self.samples:,} samples, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised"
        lines = [f"{self.output}: {counts}; {self.extracted:,} samples extracted by this run"]
        if self.lacking:
            lines += ["the store is not complete yet; still to be done:", *(f"  {line}" for line in self.lacking)]
        return "\n".join(lines)


def run_extract(cfg: ExtractConfig) -> ExtractReport:
    """Extracts what is missing in `cfg.output`.

    Raises:
        ProblemsError: the layers, the target, the data, the disk, the number of processes or an earlier run's settings
            do not fit (all differences are listed), or the self-check failed: nothing was written then. Or a batch's
            states do not fit its tokens.
    """
    assert cfg.ring is None, "run_extract_ring writes rings"
    plan = make_plan(cfg)
    source = reusable(plan)
    process = sharing_process(plan)
    raise_problems(process_problems(plan) if source is None else ())
    if plan.engine == "streamed":
        plan = settle_sizes(plan, begun_settings(plan))
    lacking: Sequence[str] = ()
    _say_changes(plan)
    check_disk(plan)
    if check_resume(plan):
        extracted = 0
    elif source is not None and process.count > 1:
        print(_COPIED, file=sys.stderr)
        extracted, lacking = copy_jointly(plan, source, process)
    elif plan.engine == "streamed" and source is None:
        extracted, lacking = extract_streamed(plan)
    else:
        extracted = _run_whole(plan, write_store)
    manifest = begun_manifest(plan)  # a process without a share may end before the first one begins the store
    stored = [sample for shard in manifest.shards for sample in shard.samples] if manifest else []
    return ExtractReport(
        output=cfg.output,
        samples=len(stored),
        tokens=sum(sample.tokens for sample in stored),
        supervised_tokens=sum(sample.supervised for sample in stored),
        extracted=extracted,
        prepared=plan.prepared,
        lacking=lacking,
    )


def run_extract_ring(cfg: ExtractConfig) -> RingReport:
    """Extracts into the ring `cfg.output` until all of its epochs are made, or its trainer needs no more.

    Raises:
        ProblemsError: as `run_extract`; another writer is at work, or no trainer came.
    """
    plan = make_plan(cfg)
    raise_problems(process_problems(plan))
    plan = for_ring(plan)
    _say_changes(plan)
    if plan.engine == "streamed" and reusable(plan) is None:
        return extract_streamed_ring(plan)
    check_ring(plan, plan_ring(plan))
    return _run_whole(plan, write_ring)


def _say_changes(plan: ExtractPlan) -> None:
    if plan.cfg.from_store is not None:
        print(f"extracting from {plan.cfg.from_store} again:", *changes(plan), sep="\n  ", file=sys.stderr)


def _run_whole(plan: ExtractPlan, write: Write[Done]) -> Done:
    """With whatever gives whole samples."""
    if (source := reusable(plan)) is not None:
        print(_COPIED, file=sys.stderr)
        return copy_states(plan, source, write)
    return extract_served(plan, write) if plan.engine == "sglang" else _extract(plan, write)


def _extract(plan: ExtractPlan, write: Write[Done]) -> Done:
    cfg, spec = plan.cfg, plan.files.spec
    model = load_model(plan.files, cfg.target)
    engine = TransformersEngine(model, spec, plan.contract.wiring, cfg.last_hidden_states)
    tensors = spec.head_tensors(model)
    head = make_target_head(tensors, plan.files.text_config, cfg.last_hidden_states)
    ids, tokens = Each(plan.samples, lambda sample: sample.id), Each(plan.samples, lambda sample: sample.input_ids)
    self_check(engine, ids, tokens, head, plan.layout.value_dtype)
    head_tensors = {name: tensor.cpu() for name, tensor in tensors.items()}

    def captured(missing: Sequence[int]) -> Iterator[tuple[int, StoredSample]]:
        """Which samples share a forward pass depends on the set and the limits alone."""
        lengths = [plan.sample_tokens[index][1] for index in missing]
        for batch in batches_by_length(lengths, cfg.batch_tokens):
            for index, sample in _capture(plan, engine, [missing[place] for place in batch]):
                yield index, with_argmax(sample, plan.layout, head)

    return write(plan, head_tensors, captured, engine.neighbours)


def _capture(plan: ExtractPlan, engine: CaptureEngine, chosen: Sequence[int]) -> Iterator[tuple[int, StoredSample]]:
    samples = [plan.samples[index] for index in chosen]
    ids, tokens = [sample.id for sample in samples], [sample.input_ids for sample in samples]
    captures = capture_samples(engine, ids, tokens, plan.aux_width)
    for index, sample, capture in zip(chosen, samples, captures, strict=True):
        yield index, stored_sample(sample, capture, plan.layout.value_dtype)

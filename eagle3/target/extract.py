"""`eagle3 extract`: the target's hidden states for conversations, as a store.

Everything that can be refused is refused before the first byte is written (`plan.py`, `selfcheck.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.config import ExtractConfig
from eagle3.data.chat import PrepareReport
from eagle3.data.store import StoredSample, StoreWriter
from eagle3.draft.loss import TargetHead
from eagle3.errors import raise_problems
from eagle3.progress import progress
from eagle3.provenance import provenance
from eagle3.target.capture import CaptureEngine, batches_by_length, capture_samples, shards_by_size, stored_sample
from eagle3.target.engines.transformers import TransformersEngine, load_model
from eagle3.target.plan import ExtractPlan, check_disk, check_resume, make_plan, process_problems
from eagle3.target.reuse import changes, copy_states, reusable
from eagle3.target.selfcheck import self_check
from eagle3.target.served_extract import extract_served
from eagle3.target.stream_extract import extract_streamed
from eagle3.target.stream_plan import begun_manifest, begun_settings, settle_sizes


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
    plan = make_plan(cfg)
    raise_problems(process_problems(plan))
    if plan.engine == "streamed":
        plan = settle_sizes(plan, begun_settings(plan))
    lacking: Sequence[str] = ()
    if cfg.from_store is not None:
        print(f"extracting from {cfg.from_store} again:", *changes(plan), sep="\n  ", file=sys.stderr)
    check_disk(plan)
    if check_resume(plan):
        extracted = 0
    elif (source := reusable(plan)) is not None:
        print("it has all of these states: they are copied, the target does not run", file=sys.stderr)
        extracted = copy_states(plan, source)
    elif plan.engine == "streamed":
        extracted, lacking = extract_streamed(plan)
    elif plan.engine == "sglang":
        extracted = extract_served(plan)
    else:
        extracted = _extract(plan)
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


def _extract(plan: ExtractPlan) -> int:
    cfg, spec = plan.cfg, plan.files.spec
    model = load_model(plan.files, cfg.target)
    engine = TransformersEngine(model, spec, plan.contract.wiring, cfg.last_hidden_states)
    tensors = spec.head_tensors(model)
    head = TargetHead(
        lm_head=tensors.get("lm_head.weight", tensors["embed_tokens.weight"]),
        norm_weight=tensors["norm.weight"],
        eps=plan.files.text_config["rms_norm_eps"],
        kind=cfg.last_hidden_states,
    )
    ids = [sample.id for sample in plan.samples]
    self_check(engine, ids, [sample.input_ids for sample in plan.samples], head, plan.store_dtype)
    with StoreWriter(
        plan.folder,
        plan.contract,
        plan.settings,
        plan.files.text_config,
        {name: tensor.cpu() for name, tensor in tensors.items()},
        provenance={**provenance(), "config": cfg.model_dump(mode="json")},
        other_states=engine.neighbours,
    ) as writer:
        for problem in writer.redone:
            print(f"redone: {problem}", file=sys.stderr)
        return extract_missing(plan, engine, writer)


def extract_missing(plan: ExtractPlan, engine: CaptureEngine, writer: StoreWriter) -> int:
    """Captures and writes, a shard at a time, the samples that the store lacks; returns how many.

    Which samples share a shard and a forward pass depends on the whole set and the limits alone: a killed run leaves
    whole shards, and the resumed store equals an uninterrupted one bit for bit.
    """
    cfg = plan.cfg
    shards = shards_by_size(plan.sizes, cfg.shard_max_bytes, cfg.shard_max_samples)
    work = [[index for index in shard if plan.samples[index].id not in writer.completed] for shard in shards]
    lengths = [len(sample.input_ids) for sample in plan.samples]
    with progress("extract", sum(lengths[index] for shard in work for index in shard), "tokens") as advance:
        for missing in filter(None, work):
            stored: dict[int, StoredSample] = {}
            for batch in batches_by_length([lengths[index] for index in missing], cfg.batch_tokens):
                stored.update(_capture(plan, engine, [missing[place] for place in batch]))
                advance(sum(lengths[missing[place]] for place in batch))
            writer.write_shard([stored[index] for index in missing])
    return sum(map(len, work))


def _capture(plan: ExtractPlan, engine: CaptureEngine, chosen: Sequence[int]) -> dict[int, StoredSample]:
    samples = [plan.samples[index] for index in chosen]
    ids, tokens = [sample.id for sample in samples], [sample.input_ids for sample in samples]
    captures = capture_samples(engine, ids, tokens, plan.aux_width)
    return {
        index: stored_sample(sample, capture, plan.store_dtype)
        for index, sample, capture in zip(chosen, samples, captures, strict=True)
    }

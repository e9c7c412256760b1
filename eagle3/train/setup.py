"""What a run trains, made from its config and checked before anything is written.

Shapes: D draft vocab, H target hidden, V target vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.config import TrainConfig
from eagle3.data.chat import load_tokenizer, template_digest, tokenizer_digest
from eagle3.data.open_reader import open_reader
from eagle3.data.ring_reader import RingReader
from eagle3.data.target_argmax import make_target_head
from eagle3.data.vocab_coverage import held
from eagle3.data.vocab_file import read_vocab
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.init import init_layer_from_target, start_fc_at_last_slot
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import refuse_url, size_text
from eagle3.target.layer_tensors import read_layer
from eagle3.target.resolve import find_target
from eagle3.train.feed import Dataset
from eagle3.train.moments import moment_bytes
from eagle3.train.ring_feed import check_ring, ring_windows
from eagle3.train.samples import Samples, TrainSamples, select_ring_samples, select_samples
from eagle3.train.warm_start import WarmStart, find_warm_start
from eagle3.wiring.contract import WiringContract, config_digest
from eagle3.wiring.layers import check_output_indices, is_int


@dataclass(frozen=True)
class Setup:
    """Everything a run starts from.

    Attributes:
        contract: the dataset's, with the draft vocab's digest.
        samples: training and held-out samples.
        vocab: the draft vocab, on the CPU.
        module: the drafter with its loss, on the CPU, in float32, as it is before the first step.
        head: the target's head, on the CPU; of the draft vocab alone where the samples have its greedy tokens.
        notes: what a user should know, a line each.
        origin: what the run's provenance says besides: the drafter that it starts from, if any.
    """

    contract: WiringContract
    samples: Samples
    vocab: DraftVocab
    module: TTTLoss
    head: TargetHead
    notes: list[str]
    origin: dict[str, Any] = field(default_factory=dict)


def make_setup(config: TrainConfig, processes: int = 1) -> Setup:
    """Opens and checks the datasets, chooses the draft vocab and makes the drafter.

    Args:
        processes: ranks that will train.

    Raises:
        ProblemsError: the dataset is damaged, or is not what the config asks for (every difference is listed); the
            drafter cannot have this shape; the one in `init_from` is damaged or does not fit (likewise).
    """
    samples = open_samples(config, processes)
    reader, ttt = samples.train.reader, ttt_settings(config)
    warm = find_warm_start(config, reader)
    vocab, coverage = choose_vocab(config, samples.train, warm)
    target = reader.target_head()
    model = make_model(config, reader, vocab, target, warm)
    kept = "" if warm is None else warm.take(model, vocab)
    module = TTTLoss(model, vocab, ttt)
    counts = module.model.config.parameter_counts()
    notes = [
        *samples.notes,
        *([] if warm is None else warm.notes),
        f"draft vocab: {len(vocab)} of {vocab.vocab_size} tokens, {coverage:.2%} of the supervised tokens{kept}",
        f"drafter: {counts['total']:,} parameters, {counts['trainable']:,} of them trained",
        f"moments: {config.optim.kept}, {size_text(moment_bytes(module.model, config.optim.kept))}",
    ]
    contract = reader.contract.with_draft_vocab(vocab.digest)
    head = make_head(config, reader, target)
    if samples.have_argmax:
        head = head.only(vocab.ids)
    else:
        whole = size_text(head.lm_head.nbytes)
        notes.append(f"the target's greedy tokens are not stored (format 1 or 2): all of its head is kept, {whole}")
    return Setup(contract, samples, vocab, module, head, notes, {} if warm is None else warm.record)


def ttt_settings(config: TrainConfig) -> TTTSettings:
    """The training-time test that a config asks for."""
    return TTTSettings(**config.ttt.model_dump())


def open_samples(config: TrainConfig, processes: int) -> Samples:
    """The checked training and held-out samples; see `make_setup`."""
    if config.ring is None:
        store = open_reader(config.dataset, config.cache, allow_incomplete=config.allow_incomplete)
        raise_problems(check_dataset_contract(config, store.contract), f"cannot train on {config.dataset}")
        return select_samples(config, store)
    refuse_url(config.dataset, "a ring", "give a folder that extraction and training share; a store may lie at a URL")
    ring = RingReader(Path(config.dataset), config.ring.wait_seconds)
    windows = ring_windows(config, ring, processes)
    problems = check_dataset_contract(config, ring.contract) + check_ring(config, ring, windows)
    raise_problems(problems, f"cannot train from {config.dataset}")
    return select_ring_samples(config, ring, windows)


def check_dataset_contract(config: TrainConfig, contract: WiringContract) -> list[Problem]:
    """Everything in which a dataset is not what the config asks for."""
    problems = check_output_indices(config.output_indices, contract.num_hidden_layers)
    wanted = contract if problems else replace(contract, output_indices=tuple(config.output_indices))
    if config.target is not None:
        files = find_target(config.target, weights=False)
        tokenizer = load_tokenizer(str(files.folder), trust_remote_code=config.target.trust_remote_code)
        wanted = replace(
            wanted,
            target_family=files.facts.family,
            target_config_digest=config_digest(files.config),
            num_hidden_layers=files.facts.num_hidden_layers,
            hidden_size=files.facts.hidden_size,
            vocab_size=files.facts.vocab_size,
            tokenizer_digest=tokenizer_digest(tokenizer),
            chat_template_digest=template_digest(tokenizer),
        )
    return problems + contract.compare(wanted, f"dataset {config.dataset}", "training config")


def choose_vocab(config: TrainConfig, train: TrainSamples, warm: WarmStart | None) -> tuple[DraftVocab, float]:
    """The draft vocab and the share of supervised training tokens that it holds.

    That of `vocab_file`, or of the drafter which the run starts from, unless it is to be rebuilt; else counted over the
    training samples of this very dataset, and the target's special tokens are kept.
    """
    reader, size = train.reader, vocab_size(config, warm)
    if size is None:
        return DraftVocab.full(reader.contract.vocab_size), 1.0
    counts = train.count_supervised()
    if config.vocab_file is not None:
        vocab = given_vocab(config.vocab_file, reader.contract, config.draft.draft_vocab_size)
        return vocab, held(counts, vocab)
    if warm is not None and not warm.rebuild:
        return warm.vocab, float(counts[warm.vocab.ids].sum() / counts.sum())
    keep_ids = reader.settings.get("keep_ids")
    if not isinstance(keep_ids, list) or not all(is_int(item) and abs(item) < 2**63 for item in keep_ids):
        message = f"settings.keep_ids is {str(keep_ids)[:60]}, expected the special tokens' ids"
        fix = "restore the manifest, or extract again into an empty folder"
        raise problem_error(reader.name, "store.keep_ids", message, fix)
    vocab = DraftVocab.from_counts(counts, size, keep_ids)
    return vocab, float(counts[vocab.ids].sum() / counts.sum())


def given_vocab(path: str, contract: WiringContract, size: int | None) -> DraftVocab:
    """The draft vocab of a file.

    Raises:
        ProblemsError: it cannot be read; kinds `vocab.other_tokenizer`, `vocab.size`.
    """
    found, problems = read_vocab(Path(path)), []
    of = (found.vocab.vocab_size, found.tokenizer_digest)
    if of != (contract.vocab_size, contract.tokenizer_digest):
        message = (
            f"is of {of[0]} tokens of {of[1]}, the dataset of {contract.vocab_size} of {contract.tokenizer_digest}"
        )
        problems.append(Problem(path, "vocab.other_tokenizer", message, "make it from this dataset"))
    if size not in (None, len(found.vocab)):
        message = f"holds {len(found.vocab)} tokens, draft.draft_vocab_size is {size}"
        problems.append(Problem(path, "vocab.size", message, f"pass draft.draft_vocab_size={len(found.vocab)}"))
    raise_problems(problems)
    return found.vocab


def vocab_size(config: TrainConfig, warm: WarmStart | None) -> int | None:
    """Entries of the draft vocab; None for the target's whole one."""
    if config.vocab_file is not None:
        return len(read_vocab(Path(config.vocab_file)).vocab)
    if warm is None:
        return config.draft.draft_vocab_size
    return (config.draft.draft_vocab_size if warm.rebuild else None) or len(warm.vocab)


def draft_config(
    config: TrainConfig, reader: Dataset, draft_vocab_size: int, warm: WarmStart | None = None
) -> DraftConfig:
    """The drafter's shape: of the one that it starts from, else the config's and the target's.

    Raises:
        ProblemsError: the drafter cannot have it.
    """
    if warm is not None:
        return warm.shape(draft_vocab_size)
    shape = config.draft.model_dump(exclude={"init", "init_layer", "fc_init", "rope", "draft_vocab_size"})
    rope = None if config.draft.rope is None else RopeConfig(**config.draft.rope.model_dump())
    num_aux = len(config.output_indices)
    return DraftConfig.from_target(
        reader.target_config, num_aux=num_aux, rope=rope, draft_vocab_size=draft_vocab_size, **shape
    )


def planned_shape(config: TrainConfig, reader: Dataset) -> DraftConfig:
    """The shape of a run's drafter, without its weights.

    Raises:
        ProblemsError: as `make_setup` about the drafter.
    """
    warm = find_warm_start(config, reader, values=False)
    return draft_config(config, reader, vocab_size(config, warm) or reader.contract.vocab_size, warm)


def make_model(
    config: TrainConfig,
    reader: Dataset,
    vocab: DraftVocab,
    target: dict[str, Tensor],
    warm: WarmStart | None = None,
) -> DraftModel:
    """A drafter that has learnt nothing: the target's embedding; head, final norm and layer by `draft.init`."""
    model = DraftModel(draft_config(config, reader, len(vocab), warm))
    model.init_weights(config.seed)
    if config.draft.fc_init == "last_slot":
        start_fc_at_last_slot(model.fc)
    if config.draft.init == "target_layer" and warm is None:
        assert config.target is not None
        init_layer_from_target(model, read_layer(config.target, config.draft.init_layer, model.config))
    from_target = config.draft.init != "random"
    model.init_from_target(
        target["embed_tokens.weight"],
        target["norm.weight"] if from_target else None,
        target["lm_head.weight"] if from_target else None,
        vocab,
    )
    return model


def make_head(config: TrainConfig, reader: Dataset, target: dict[str, Tensor]) -> TargetHead:
    """The target's head; in float32 where the run computes in float32."""
    head = make_target_head(target, reader.target_config, reader.contract.last_hidden_states)
    return replace(head, lm_head=head.lm_head.float()) if config.mixed_precision == "no" else head

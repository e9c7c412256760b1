"""`eagle3 export`: a run's checkpoint as the folder that a serving engine loads.

Deterministic: two exports of one checkpoint are byte-equal. Either the whole folder appears or nothing does.
`docs/export.md` says what each file holds and who reads it.

Shapes: H hidden, V target vocab.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import ServeConfig, TrainConfig
from eagle3.data.open_reader import open_reader
from eagle3.data.ring_reader import RingReader
from eagle3.data.tensor_file import write_tensor_file
from eagle3.errors import ProblemsError, problem_error, raise_problems
from eagle3.files import atomic_folder, is_url, read_json, read_json_object, refuse_url, write_json_atomic
from eagle3.serve.adapter import EMBEDDING, to_exported
from eagle3.serve.draft_config import exported_config, is_exported_config
from eagle3.serve.saved_draft import find_checkpoint, load_run, train_config
from eagle3.wiring.checkpoint_tensors import WEIGHTS_FILE
from eagle3.wiring.checks import check_checkpoint
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.dataset import RING_FILE
from eagle3.wiring.engines import EngineIds, find_convention, graphs_difference, ids_to_write
from eagle3.wiring.fingerprint_file import FINGERPRINT_FILE, load_fingerprint
from eagle3.wiring.layers import describe_layers
from eagle3.wiring.targets import CONFIG_FILE, served_context, text_config

_FILES = {CONFIG_FILE, WEIGHTS_FILE, CONTRACT_FILE, FINGERPRINT_FILE}
_FILE_TYPE = {"format": "pt"}  # as Transformers writes it; a single entry has one order, so one sequence of bytes


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        output: the exported folder.
        checkpoint: name of the run's checkpoint that it came from.
        ids: the layer ids written for the engine, and the engine and version they are for.
        version_is_default: nobody named the version; the newest known was taken.
        contract: as written beside the weights.
        context_length: longest context the draft is exported for, in tokens.
        trained_length: longest row it was trained on, in tokens.
        graphs_difference: in words, the other layers that this version's CUDA graphs capture; None if they do not.
    """

    output: Path
    checkpoint: str
    ids: EngineIds
    version_is_default: bool
    contract: WiringContract
    context_length: int
    trained_length: int
    graphs_difference: str | None

    @property
    def warnings(self) -> list[str]:
        """What is allowed, but may cost acceptance."""
        warnings = []
        if self.graphs_difference is not None:
            warnings.append(f"serve it with --disable-cuda-graph: {self.graphs_difference}")
        if self.trained_length < self.context_length:
            warnings.append(
                f"trained on rows of up to {self.trained_length} tokens, exported for a context of "
                f"{self.context_length}: acceptance beyond the trained length is unmeasured"
            )
        return warnings

    def render(self) -> str:
        """The report as text."""
        ids, chosen = self.ids, "as given"
        if self.version_is_default:
            chosen = "the newest known; name another with engine_version"
        lines = [
            f"exported {self.checkpoint} to {self.output}",
            f"  for {ids.engine} {ids.version} ({chosen}), target {self.contract.target_name}",
            f"  captures {describe_layers(self.contract.output_indices)}",
            f"  {ids.key} = {list(ids.ids)}; boundaries for vLLM {list(self.contract.wiring.boundaries)}",
            f"  context length {self.context_length}",
        ]
        return "\n".join(lines + [f"  warning: {warning}" for warning in self.warnings])


def export_run(cfg: ServeConfig) -> ExportReport:
    """Exports one checkpoint of a run for one engine version, and checks the result as that server would read it.

    Raises:
        ProblemsError: the run is damaged or contradicts itself; this version cannot serve this drafter or target;
            the output is something else than an export; the wiring check of the result fails. Nothing is written.
    """
    for place in (cfg.run, cfg.output):
        refuse_url(place, "a run or an export", "give a folder; the run's dataset may lie at a URL")
    run, output = Path(cfg.run), Path(cfg.output)
    _check_output(output)
    checkpoint = find_checkpoint(run, cfg.checkpoint)
    draft = load_run(run, checkpoint.name)
    contract, trained = draft.contract, train_config(run)
    ids = ids_to_write(contract.wiring, cfg.engine, cfg.engine_version, contract.target_family)
    target = text_config(read_json_object(run / "target_config.json", "the target's config of a run"))
    context = cfg.context_length or served_context(target)
    config = exported_config(draft.config, ids, contract.wiring, context, cfg.dtype)
    embedding = _target_embedding(trained, contract) if cfg.include_embedding else None
    dtype = getattr(torch, cfg.dtype)
    tensors = to_exported(draft.state, draft.config, draft.vocab, dtype, embedding, str(checkpoint))
    with atomic_folder(output) as folder:
        write_json_atomic(folder / CONFIG_FILE, config)
        contract.save(folder)
        if (run / FINGERPRINT_FILE).is_file():
            load_fingerprint(run)[0].save(folder)
        _write_tensors(folder / WEIGHTS_FILE, tensors)
        _check_written(folder, output, ids)
    wiring, convention = contract.wiring, find_convention(ids.engine, ids.version, contract.target_family)
    return ExportReport(
        output=output,
        checkpoint=checkpoint.name,
        ids=ids,
        version_is_default=cfg.engine_version is None,
        contract=contract,
        context_length=context,
        trained_length=trained.max_length,
        graphs_difference=graphs_difference(wiring.boundaries, convention, wiring.num_hidden_layers),
    )


def _check_output(output: Path) -> None:
    """Only an older export, and nothing beside it, may be replaced."""
    if not output.exists():
        return
    fix = "choose another folder, or move what is there"
    if not output.is_dir():
        raise problem_error(str(output), "export.output", "is a file, expected a folder", fix)
    names = {path.name for path in output.iterdir()}
    if not names:
        return
    own = CONFIG_FILE in names and is_exported_config(read_json(output / CONFIG_FILE, "the config of an export"))
    if not own:
        raise problem_error(str(output), "export.output", "exists and is not an export of ours", fix)
    if foreign := sorted(names - _FILES):
        message = f"is an export with other files beside it: {', '.join(foreign)}"
        raise problem_error(str(output), "export.output", message, fix)


def _target_embedding(trained: TrainConfig, contract: WiringContract) -> Tensor:
    """The target's embedding [V, H] from the store or ring that the run was trained on."""
    dataset = trained.dataset
    if is_url(dataset) or not (Path(dataset) / RING_FILE).exists():
        return open_reader(dataset, trained.cache, contract).target_head()[EMBEDDING]
    ring = RingReader(Path(dataset), wait_seconds=0)
    raise_problems(ring.contract.compare(contract, f"ring {dataset}", "run"))
    return ring.target_head()[EMBEDDING]


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    write_tensor_file(path, {name: [tensors[name]] for name in order}, _FILE_TYPE)


def _check_written(folder: Path, output: Path, ids: EngineIds) -> None:
    """Refuses what the wiring check finds; the problems name the folder that would have appeared."""
    problems = check_checkpoint(folder, engine=ids.engine, engine_version=ids.version, cuda_graphs=False)
    if problems:
        raise ProblemsError(
            [dataclasses.replace(item, where=item.where.replace(str(folder), str(output))) for item in problems],
            f"the export does not pass its own check, so {output} was not written",
        )

"""`eagle3 wiring`: which layers a drafter is fed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagle3.cli.common import AsJson, Cache, CacheBytes, cache_section, problems_as
from eagle3.config import CacheSection
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.files import is_url, refuse_url

wiring_app = typer.Typer(help="Which layers a drafter is fed, by engine and version.", no_args_is_help=True)

ProbeEngine = Literal["auto", "transformers", "streamed"]
EngineVersion = Annotated[str | None, typer.Option(help="The engine's version; default: as recorded, else the newest.")]


@wiring_app.command("explain")
def wiring_explain(
    target: Annotated[str, typer.Option(help="Known target's name, checkpoint folder or config.json.")],
    layers: Annotated[str, typer.Option(help="Output indices, e.g. 2,30,58.")],
    sources: Annotated[bool, typer.Option("--sources", help="Also say where each rule was read, and when.")] = False,
    as_json: AsJson = False,
) -> None:
    """What each engine and version calls these layers."""
    from eagle3.wiring.report import explain, render_explain

    with problems_as(as_json):
        print(render_explain(explain(target, layers), as_json=as_json, sources=sources))


@wiring_app.command("check")
def wiring_check(
    checkpoint: Annotated[Path, typer.Argument(help="Exported draft checkpoint.")],
    dataset: Annotated[str | None, typer.Option(help="Hidden-state store it was trained on: folder or URL.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: known name, folder or config.json.")] = None,
    engine: Annotated[str, typer.Option(help="Serving engine: sglang or vllm.")] = "sglang",
    engine_version: EngineVersion = None,
    layers: Annotated[
        str | None, typer.Option(help="Output indices it was trained on, e.g. 2,30,58: for another tool's checkpoint.")
    ] = None,
    cuda_graphs: Annotated[bool, typer.Option(help="The server uses CUDA graphs (its default).")] = True,
    cache: Cache = None,
    cache_max_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """Every reason why a server would feed this drafter other layers; exit code 0 or 2."""
    from eagle3.wiring.checks import check_checkpoint, describe_checkpoint
    from eagle3.wiring.layers import parse_layers
    from eagle3.wiring.report import exit_code, render_json, render_text

    with problems_as(as_json), _local(dataset, cache_section(cache, cache_max_bytes)) as folder:
        problems = check_checkpoint(
            checkpoint,
            dataset=folder,
            target=target,
            engine=engine,
            engine_version=engine_version,
            layers=parse_layers(layers) if layers is not None else None,
            cuda_graphs=cuda_graphs,
        )
        problems = _elsewhere(problems, folder, dataset)
    print((render_json if as_json else render_text)(problems))
    if not problems and not as_json:
        print(describe_checkpoint(checkpoint, engine, engine_version, target=target))
    raise typer.Exit(exit_code(problems))


@contextmanager
def _local(dataset: str | None, cache: CacheSection | None) -> Iterator[Path | None]:
    """The folder of a store; of one at a URL, a folder that says what it holds."""
    if dataset is None or not is_url(dataset):
        yield None if dataset is None else Path(dataset)
        return
    from eagle3.data.remote_verify import wiring_view

    with wiring_view(dataset, cache) as folder:
        try:
            yield folder
        except ProblemsError as error:
            raise ProblemsError(_elsewhere(error.problems, folder, dataset)) from error


def _elsewhere(problems: Iterable[Problem], folder: Path | None, dataset: str | None) -> list[Problem]:
    """Problems of the folder that stands for a store at a URL, as of the URL."""
    if dataset is None or not is_url(dataset):
        return list(problems)
    return [
        replace(item, **{key: text.replace(str(folder), dataset) for key, text in item.to_dict().items()})
        for item in problems
    ]


@wiring_app.command("probe")
def wiring_probe(
    path: Annotated[Path, typer.Argument(help="Hidden-state store, run or exported checkpoint.")],
    target: Annotated[str | None, typer.Option(help="Target to compute again: checkpoint folder or hub id.")] = None,
    server: Annotated[str | None, typer.Option(help="Or: URL of a running SGLang that serves the drafter.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Stored samples to compute again, beside the fingerprint.")] = 4,
    engine: Annotated[
        ProbeEngine, typer.Option(help="How the target is run; auto streams what does not fit.")
    ] = "auto",
    skip_last: Annotated[
        bool, typer.Option("--skip-last", help="Leave the last hidden states and layers out.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, or auto.")] = "auto",
    api_key: Annotated[str | None, typer.Option(envvar="EAGLE3_API_KEY", help="API key of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """What each slot of a store, or of a running server, really holds; exit code 0 or 2."""
    from eagle3.wiring.report import exit_code

    with problems_as(as_json):
        if (target is None) == (server is None):
            fix = "give one: the target, to check a store, or the server, to check how it feeds the drafter"
            raise problem_error("wiring probe", "probe.what", "needs either --target or --server", fix)
        refuse_url(path, "what is probed", "run `eagle3 data pull URL FOLDER`, and give that folder")
        if server is not None:
            from eagle3.serve.server_probe import probe_server

            report = probe_server(path, server, api_key=api_key)
        else:
            from eagle3.target.probe import probe_dataset

            assert target is not None
            report = probe_dataset(path, target, samples, engine, last=not skip_last, device=device)
    print(report.render(as_json))
    raise typer.Exit(exit_code(report.problems))

"""From a config to the server's command: the wiring check first, then all that is known to fail at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eagle3.config.launch_schema import LaunchConfig
from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.files import read_json_object
from eagle3.serve.launch import sglang, vllm
from eagle3.serve.launch.command import LaunchCommand
from eagle3.serve.launch.context import Context, decide_context
from eagle3.serve.launch.extra import check_extra
from eagle3.serve.launch.files import check_split, check_target_folder, is_path, known_name
from eagle3.serve.launch.flags import canonical, check_read
from eagle3.serve.launch.nccl import PRESETS, preset_env
from eagle3.wiring.checkpoint_layers import version_to_check
from eagle3.wiring.checks import check_checkpoint, describe_checkpoint
from eagle3.wiring.conventions import ENGINE_NAMES
from eagle3.wiring.layouts import recognise
from eagle3.wiring.targets import CONFIG_FILE, target_facts, text_config
from eagle3.wiring.version import Version

_T = TypeVar("_T")
_CONTEXT = "context.too_short"


class _Found:
    """Problems so far, so that one that stops a check does not hide what others find."""

    def __init__(self, ignored: list[str]) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.ignored = ignored

    def add(self, problems: list[Problem]) -> None:
        for problem in problems:
            if problem.kind in self.ignored:
                self.notes.append(f"ignored as asked: [{problem.kind}] {problem.message}")
            elif problem not in self.problems:
                self.problems.append(problem)

    def get(self, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except ProblemsError as error:
            self.add(list(error.problems))
            return None


def build_command(cfg: LaunchConfig) -> LaunchCommand:
    """The server's exact command.

    Runs `eagle3 wiring check` on the checkpoint, and looks at what is known to fail after minutes of loading.
    What only this machine knows (its ports, its Python) is checked by `start_server`.

    Raises:
        ProblemsError: every problem of the wiring check that is not in `ignore_problems`; kinds `launch.*`.
    """
    found = _Found(cfg.ignore_problems)
    draft = _draft_config(cfg)
    chosen = found.get(lambda: version_to_check(draft or {}, cfg.engine, cfg.engine_version))
    if chosen is None:
        raise ProblemsError(found.problems)
    version = chosen[0]
    found.notes.append(f"{ENGINE_NAMES[cfg.engine]} {version}: {chosen[1]}")
    _check_version(found, cfg, version)
    target_context = _check_target(found, cfg)
    context = decide_context(cfg, target_context, draft)
    if cfg.steps:
        _check_wiring(found, cfg, version, keep_context=target_context is None and cfg.context_length is None)
    if draft is not None:
        found.add(list(check_split(draft, cfg.tp, str(cfg.checkpoint))))
    found.add(context.problems)
    found.notes += context.notes
    preset, problems = preset_env(cfg.nccl)
    found.add(problems)
    found.notes += [f"nccl {name}: {PRESETS[name].does}" for name in cfg.nccl]
    arguments = _arguments(found, cfg, version, context)
    raise_problems(found.problems, "this server is not started")
    return _command(cfg, version, arguments, preset, context, found.notes)


def _check_version(found: _Found, cfg: LaunchConfig, version: str) -> None:
    if cfg.engine == "vllm":
        found.get(lambda: vllm.check_vllm_version(version))
        found.add(list(vllm.check_vllm(cfg)))
        return
    found.get(lambda: check_read(version))
    if cfg.attention_backend == "trtllm_mha" and cfg.topk > 1:
        message = f"trtllm_mha takes chains only, topk is {cfg.topk}: SGLang refuses to start"
        found.add([Problem("attention_backend", "launch.unsupported", message, "set topk=1, or use another backend")])


def _check_target(found: _Found, cfg: LaunchConfig) -> int | None:
    """Looks at the target's folder, if it is here; returns its context in tokens, if somebody knows it."""
    folder = Path(cfg.target).expanduser()
    if is_path(cfg.target):
        if folder.exists():
            found.add(list(check_target_folder(folder, cfg.extra_args)))
        else:
            found.notes.append(f"{cfg.target} is not on this machine: its files were not looked at")
    if (folder / CONFIG_FILE).is_file():
        config = found.get(lambda: read_json_object(folder / CONFIG_FILE, "a target model's config.json"))
        if config is not None and not any(canonical(item) == "--enable-dp-attention" for item in cfg.extra_args):
            found.add(list(check_split({**text_config(config), "intermediate_size": None}, cfg.tp, str(folder))))
    name = known_name(cfg.target_name, cfg.target)
    facts = found.get(lambda: target_facts(name)) if name is not None else None
    return facts.context_length if facts is not None else None


def _check_wiring(found: _Found, cfg: LaunchConfig, version: str, keep_context: bool) -> None:
    """`eagle3 wiring check`; the context is ours to check (`decide_context`) where it is known."""
    assert cfg.checkpoint is not None
    name = known_name(cfg.target_name, cfg.target)
    problems = check_checkpoint(
        cfg.checkpoint,
        dataset=cfg.dataset,
        target=name,
        engine=cfg.engine,
        engine_version=version,
        layers=cfg.layers,
        cuda_graphs=cfg.cuda_graphs,
    )
    wrong = [problem for problem in problems if keep_context or problem.kind != _CONTEXT]
    found.add(wrong)
    if not wrong:
        found.notes.append("wiring check: " + describe_checkpoint(cfg.checkpoint, cfg.engine, version, target=name))


def _draft_config(cfg: LaunchConfig) -> Mapping[str, Any] | None:
    """The drafter's config.json, as far as it can be read; what is wrong with it, the wiring check says."""
    if not cfg.steps or cfg.checkpoint is None:
        return None
    try:
        return recognise(read_json_object(Path(cfg.checkpoint) / CONFIG_FILE, "a checkpoint's config.json")).fields
    except ProblemsError:
        return None


def _arguments(found: _Found, cfg: LaunchConfig, version: str, context: Context) -> list[str]:
    known = None
    if cfg.engine == "vllm":
        arguments = vllm.vllm_arguments(cfg, context.argument)
    else:
        known = found.get(lambda: check_read(version))
        if known is None:
            return []
        arguments = sglang.sglang_arguments(cfg, known, context.argument)
    given = {canonical(flag): key for flag, key, _ in arguments}
    found.add(list(check_extra(cfg.extra_args, given, cfg.cuda_graphs, known)))
    return [part for flag, _, value in arguments for part in ((flag,) if value is None else (flag, value))]


def _command(
    cfg: LaunchConfig, version: str, arguments: list[str], preset: dict[str, str], context: Context, notes: list[str]
) -> LaunchCommand:
    if cfg.engine == "vllm":
        launcher, env = (*(cfg.launcher or vllm.LAUNCHER), cfg.target), {}
    else:
        launcher, env = tuple(cfg.launcher or sglang.LAUNCHER), sglang.sglang_env(cfg, context.longer)
    return LaunchCommand(
        engine=cfg.engine,
        version=str(Version(version)),
        argv=(cfg.python, *launcher, *arguments, *cfg.extra_args),
        env={**env, **preset, **cfg.env},
        host=cfg.host,
        port=cfg.port,
        target=cfg.target,
        python=cfg.python,
        has_drafter=cfg.steps > 0,
        cuda_graphs=cfg.cuda_graphs,
        passive_health=cfg.engine == "sglang" and cfg.passive_health,
        notes=tuple(notes),
    )

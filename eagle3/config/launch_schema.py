"""The config of `eagle3 serve launch`: how a server with a drafter is started."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eagle3.config.base import PathText, PositiveInt, Section

NcclPreset = Literal["pcie", "pcie_latency", "no_p2p", "one_host", "debug"]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


class LaunchConfig(Section):
    """`eagle3 serve launch`: the server's command, by engine version."""

    engine: Literal["sglang", "vllm"] = "sglang"
    """Serving engine."""
    engine_version: PathText | None = None
    """Its version; default: the one that the checkpoint was exported for, else the newest known."""
    target: PathText
    """Target model: folder, or a hub id for what is in the hub's cache on the serving machine."""
    target_name: PathText | None = None
    """Known target's name, for the wiring check where `target` is not a folder here."""
    checkpoint: PathText | None = None
    """Exported draft checkpoint; required unless `steps` is 0."""
    dataset: PathText | None = None
    """Hidden-state store that the drafter was trained on, for the wiring check."""
    layers: Annotated[list[int], Field(min_length=1)] | None = None
    """Output indices that the drafter was trained on, for the wiring check of another tool's checkpoint."""
    ignore_problems: list[str] = Field(default_factory=list)
    """Kinds of problems of the wiring check that are overridden knowingly, e.g. `checkpoint.no_contract`."""
    steps: Annotated[int, Field(ge=0, le=64, strict=True)] = 3
    """Draft steps a cycle; 0 serves the target alone: the baseline."""
    topk: PositiveInt = 1
    """Branches a draft step; 1 is a chain."""
    draft_tokens: PositiveInt | None = None
    """Tokens a request that the target verifies a cycle; default, and all that a chain can have: steps + 1."""
    tp: PositiveInt = 1
    """GPUs that share the model (tensor parallelism)."""
    dtype: PathText | None = None
    """Precision of weights and activations; default: the target's own."""
    quantization: PathText | None = None
    """The target's quantization, where its config.json does not say it; the drafter stays unquantized."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of GPU memory for weights and key/value cache; default: the engine's choice."""
    context_length: PositiveInt | None = None
    """Longest sequence served, in tokens; default: the target's."""
    allow_longer_context: bool = False
    """Serve longer sequences than the drafter's config.json (or the target's) says it can take. Its acceptance there is
    whatever it is; better: export it with the target's context."""
    max_running_requests: PositiveInt | None = None
    """Requests decoded together at most; default: the engine's (SGLang: 48 with a drafter)."""
    attention_backend: PathText | None = None
    """Attention kernels, e.g. fa3, flashinfer, triton; default: the engine's choice."""
    cuda_graphs: bool = True
    """Decode, draft and verify in CUDA graphs. `eagle3 serve wait` says whether they were captured."""
    cuda_graph_max_batch: PositiveInt | None = None
    """Largest batch with a graph; default: the engine's choice."""
    prefill_cuda_graphs: bool = True
    """Leave CUDA graphs of the prefill as the engine has them; false switches them off."""
    trust_remote_code: bool = False
    """Run Python code of the target's folder."""
    host: PathText = "127.0.0.1"
    """Address to listen on."""
    port: Port = 30000
    """Port to listen on."""
    nccl_port: Port | None = None
    """Port of NCCL's rendezvous; each server of a host needs its own. Default: the engine's choice."""
    nccl: list[NcclPreset] = Field(default_factory=list)
    """Presets of NCCL's environment; docs/serving.md says what each does."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables; they win over the presets'."""
    passive_health: bool = True
    """SGLang: `/health` answers without generating a token, so that nobody who polls it disturbs the server."""
    metrics: bool = True
    """Serve `/metrics`."""
    python: PathText = "python"
    """Python that has the engine: a name on the PATH, or the path of one in a virtual environment."""
    launcher: Annotated[list[str], Field(min_length=1)] | None = None
    """What that Python runs; default: `-m sglang.launch_server`, and for vLLM `-m vllm.entrypoints.cli.main serve`."""
    extra_args: list[str] = Field(default_factory=list)
    """More arguments of the server; on the command line, whatever follows `--`."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        wrong = []
        if self.steps == 0 and (self.topk != 1 or self.draft_tokens is not None):
            wrong.append("steps is 0, no drafter: leave topk and draft_tokens out")
        if self.steps and self.checkpoint is None:
            wrong.append("checkpoint is not given: give it, or steps=0 for the target alone")
        if self.steps and self.topk == 1 and self.draft_tokens not in (None, self.steps + 1):
            wrong.append(
                f"draft_tokens={self.draft_tokens} with {self.steps} steps: a chain (topk=1) has steps + 1 = "
                f"{self.steps + 1}, and the engine would take that without a word"
            )
        if self.steps and self.topk > 1:
            wrong += self._tree_problems()
        if len(set(self.nccl)) < len(self.nccl):
            wrong.append(f"nccl is {self.nccl}: a preset is given twice")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _tree_problems(self) -> list[str]:
        if self.draft_tokens is None:
            return [f"topk={self.topk} is a tree: give draft_tokens"]
        if self.draft_tokens <= self.steps:
            return [
                f"draft_tokens={self.draft_tokens} cannot hold a path of {self.steps} steps and the committed token"
            ]
        if self.draft_tokens > self.most_tree_tokens:
            return [
                f"draft_tokens={self.draft_tokens}: {self.steps} steps of topk={self.topk} make at most "
                f"{self.most_tree_tokens}"
            ]
        return []

    @property
    def most_tree_tokens(self) -> int:
        """Tokens that the drafter proposes, and the committed one. Each step after the first scores topk branches of
        each of topk kept ones (`sglang/srt/speculative/spec_utils.py`, `select_top_k_tokens`)."""
        return 1 + self.topk + self.topk**2 * (self.steps - 1)

    @property
    def verified_tokens(self) -> int:
        """Tokens a request in a verify; 1 without a drafter."""
        return self.draft_tokens if self.draft_tokens is not None else self.steps + 1

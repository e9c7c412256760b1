from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Kimi_K25ForConditionalGeneration, PreTrainedModel

from eagle3.data.chat import load_tokenizer
from eagle3.errors import ProblemsError
from eagle3.target.capture import Capture, capture_samples
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.layers import default_output_indices
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine, relative

TinyTarget = Callable[[str], Path]
TOKENS = SHARED_PREFIX_BATCH[1]


def transformers_states(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Transformers' own `hidden_states`, [T, H] each; the last is after the final norm."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return tuple(states[0] for states in output.hidden_states)


def test_kimi_aux_states_are_hidden_states_3_31_59(tiny_target: TinyTarget) -> None:
    folder = tiny_target("kimi")
    states = transformers_states(Kimi_K25ForConditionalGeneration.from_pretrained(folder), TOKENS)
    assert len(states) == 62
    (capture,) = make_engine(folder, [2, 30, 58]).capture([TOKENS])
    assert torch.equal(capture.aux_hidden_states, torch.cat([states[3], states[31], states[59]], dim=-1))
    assert torch.equal(capture.last_hidden_states, states[61])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_aux_states_of_the_default_layers(tiny_target: TinyTarget, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target(name))
    indices = default_output_indices(model.config.num_hidden_layers)
    states = transformers_states(model, TOKENS)
    (capture,) = make_engine(tiny_target(name), indices).capture([TOKENS])
    assert torch.equal(capture.aux_hidden_states, torch.cat([states[index + 1] for index in indices], dim=-1))


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "kimi"])
def test_embedding_and_last_layers_raw_output(tiny_target: TinyTarget, name: str) -> None:
    engine = make_engine(tiny_target(name), [-1, 0], "pre_norm")
    layers = engine.model.config.num_hidden_layers
    states = transformers_states(engine.model, TOKENS)
    engine = make_engine(tiny_target(name), [-1, layers - 1], "pre_norm")
    (capture,) = engine.capture([TOKENS])
    embedding, last = capture.aux_hidden_states.chunk(2, dim=-1)
    assert torch.equal(embedding, engine.model.get_input_embeddings()(torch.tensor(TOKENS)))
    assert torch.equal(last, capture.last_hidden_states)
    assert not torch.equal(last, states[-1])
    assert torch.equal(engine.normed(last), states[-1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "kimi"])
def test_fault_06_batched_equals_single(tiny_target: TinyTarget, name: str) -> None:
    engine = make_engine(tiny_target(name), [1, 4])
    first = engine.capture(SHARED_PREFIX_BATCH)
    singles = [engine.capture([tokens])[0] for tokens in SHARED_PREFIX_BATCH]
    again = engine.capture(SHARED_PREFIX_BATCH)
    for tokens, batched, single, repeated in zip(SHARED_PREFIX_BATCH, first, singles, again, strict=True):
        for key in ("aux_hidden_states", "last_hidden_states"):
            assert len(getattr(batched, key)) == len(tokens)
            assert relative(getattr(batched, key), getattr(single, key)) < 1e-5 * (10 if name == "kimi" else 1)
            assert torch.equal(getattr(batched, key), getattr(repeated, key))


def test_what_pads_a_row_does_not_matter(tiny_target: TinyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_target("llama"), [1, 4])
    before = engine.capture(SHARED_PREFIX_BATCH)
    pad = torch.nn.utils.rnn.pad_sequence
    monkeypatch.setattr(
        torch.nn.utils.rnn, "pad_sequence", lambda rows, batch_first: pad(rows, batch_first, padding_value=511)
    )
    after = engine.capture(SHARED_PREFIX_BATCH)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)


@pytest.mark.parametrize("short_by", [2, -1])
def test_fault_06_wrong_row_count_names_the_sample(short_by: int) -> None:
    class Short:
        def capture(self, batch: Sequence[Sequence[int]]) -> list[Capture]:
            counts = [len(tokens) for tokens in batch]
            counts[1] -= short_by
            return [Capture(torch.zeros(count, 8), torch.zeros(count, 4)) for count in counts]

    with pytest.raises(ProblemsError) as caught:
        capture_samples(Short(), ["a", "b", "c"], SHARED_PREFIX_BATCH, 8)
    assert {(problem.where, problem.kind) for problem in caught.value.problems} == {("b", "capture.rows")}
    assert f"{9 - short_by} rows of aux_hidden_states for 9 tokens" in str(caught.value)


def test_fault_06_missing_sample_and_wrong_width_are_refused() -> None:
    class Fixed:
        def __init__(self, *captures: Capture) -> None:
            self.captures = list(captures)

        def capture(self, batch: Sequence[Sequence[int]]) -> list[Capture]:
            return self.captures

    good = Capture(torch.zeros(1, 8), torch.zeros(1, 4))
    assert capture_samples(Fixed(good), ["a"], [[1]], 8) == [good]
    with pytest.raises(ProblemsError, match=r"capture\.rows.*1 samples for 2"):
        capture_samples(Fixed(good), ["a", "b"], [[1], [2]], 8)
    with pytest.raises(ProblemsError, match=r"capture\.width"):
        capture_samples(Fixed(good), ["a"], [[1]], 12)


def test_hooks_are_removed(tiny_target: TinyTarget) -> None:
    engine = make_engine(tiny_target("llama"), [-1, 1, 7], "pre_norm")
    engine.capture([TOKENS])
    modules = [*engine.spec.decoder_layers(engine.model), engine.spec.final_norm(engine.model)]
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    engine.capture([TOKENS])
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules] == before


def test_bfloat16_weights_keep_rotary_frequencies_in_float32(tiny_target: TinyTarget) -> None:
    exact = make_engine(tiny_target("llama"), [1]).model
    half = make_engine(tiny_target("llama"), [1], dtype="bfloat16").model
    assert half.get_input_embeddings().weight.dtype == torch.bfloat16
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


def test_a_missing_weight_is_refused_not_left_random(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ProblemsError, match=r"target\.missing_weights.*model\.layers\.3\.mlp\.up_proj\.weight"):
        make_engine(folder, [1])


def test_damaged_weights_are_one_clear_error(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(ProblemsError, match=r"target\.cannot_load"):
        make_engine(folder, [1])


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:500].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ProblemsError, match=r"target\.mismatched_weights.*lm_head\.weight \[500, 64\], not \[512, 64\]"
    ):
        make_engine(folder, [1])


def test_pickled_weights_are_never_read(tiny_target: TinyTarget, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target("llama"), tmp_path / "target")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ProblemsError, match=r"target\.cannot_load"):
        make_engine(folder, [0])


@pytest.mark.parametrize("change", [{"rope_parameters": 5}, {"pad_token_id": 10**6}, {"hidden_act": {}}])
def test_a_config_that_transformers_cannot_take_is_a_named_problem(
    tiny_target: TinyTarget, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = shutil.copytree(tiny_target("llama"), tmp_path / "target")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ProblemsError, match=r"target\.cannot_load"):
        make_engine(folder, [0])


@pytest.mark.parametrize("text", ["{}", "null", '{"model": {"type": "other"}}', "["])
def test_a_damaged_tokenizer_is_a_named_problem(tiny_target: TinyTarget, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(tiny_target("llama"), tmp_path / "target")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ProblemsError, match=r"tokenizer\.unreadable"):
        load_tokenizer(str(folder))

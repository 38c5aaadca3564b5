"""What `capture` keeps is what the model's attention read: recomputing attention from it gives the model's own output."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tilewise.capture import Capture, LayerCapture, capture, load_capture, sample_path

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

LENGTH = 37


def tiny_llama(implementation: str = "sdpa", **changes) -> torch.nn.Module:
    """A random Llama with 2 layers, 6 query and 2 KV heads of width 10."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=60,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=128,
        attn_implementation=implementation,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def attention_from(layer: LayerCapture) -> torch.Tensor:
    """Softmax attention from its definition, in fp64: [B, T_q, H_q, d_v]."""
    group = layer.q.shape[2] // layer.k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (layer.q, layer.k, layer.v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows, keys = q.shape[2], k.shape[2]
    position = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)
    shows = torch.ones(rows, keys, dtype=torch.bool)
    if layer.causal:
        shows = key <= position
    if layer.window is not None:
        shows = shows & (key > position - layer.window)
    logits = (q @ k.mT * layer.scale).masked_fill(~shows, float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2)


def outputs_before_o_proj(model: torch.nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's attention hands to its output projection, from an ordinary pass of the model."""
    found: list[torch.Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: found.append(args[0].detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.eval()(inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_recomputed_from_a_capture_is_the_models(implementation: str, batch: int) -> None:
    model, inputs = tiny_llama(implementation), tokens(batch)
    expected = outputs_before_o_proj(model, inputs)
    result = capture(model, inputs, [0, 1], dtype=torch.float32)
    for number, layer in result.layers.items():
        assert layer.q.shape == (batch, LENGTH, 6, 10) and layer.k.shape == layer.v.shape == (batch, LENGTH, 2, 10)
        assert layer.scale == pytest.approx(10**-0.5)
        actual = attention_from(layer).flatten(2)
        torch.testing.assert_close(actual, expected[number].double(), rtol=0, atol=1e-5)


def test_last_query_rows_are_the_last_outputs() -> None:
    model, inputs = tiny_llama(), tokens()
    expected = outputs_before_o_proj(model, inputs)
    result = capture(model, inputs, [1], query_rows=5, dtype=torch.float32)
    assert list(result.layers) == [1]
    assert result.layers[1].q.shape[1] == 5 and result.layers[1].k.shape[1] == LENGTH
    assert result.metadata["query_positions"] == f"{LENGTH - 5}:{LENGTH}"
    actual = attention_from(result.layers[1]).flatten(2)
    torch.testing.assert_close(actual, expected[1][:, -5:].double(), rtol=0, atol=1e-5)


def test_rope_is_in_the_capture() -> None:
    model = tiny_llama()
    inputs = torch.full((1, LENGTH), 7)  # one token repeated: before RoPE all keys of layer 0 are equal
    k = capture(model, inputs, [0], dtype=torch.float32).layers[0].k
    assert not torch.allclose(k[:, 0], k[:, 9])
    torch.testing.assert_close(k[:, 0].norm(dim=-1), k[:, 9].norm(dim=-1))


def test_sliding_window_layers_are_kept_with_their_window() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=40,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        attn_implementation="sdpa",
    )
    model = transformers.MistralForCausalLM(config)
    inputs = tokens()
    expected = outputs_before_o_proj(model, inputs)
    layer = capture(model, inputs, [0], dtype=torch.float32).layers[0]
    assert layer.window == 8
    torch.testing.assert_close(attention_from(layer).flatten(2), expected[0].double(), rtol=0, atol=1e-5)


def test_full_attention_of_an_encoder_is_kept_as_not_causal() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=40, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.BertModel(config)
    assert not capture(model, tokens(), [0], dtype=torch.float32).layers[0].causal


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_refused(implementation: str, side: str) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    inputs = {"input_ids": tokens(2), "attention_mask": mask}
    with pytest.raises(ValueError, match="one unpadded sequence at a time"):
        capture(tiny_llama(implementation), inputs, [0])


def test_a_packed_row_is_refused() -> None:
    positions = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
    with pytest.raises(ValueError, match="padded or packed"):
        capture(tiny_llama(), {"input_ids": tokens(), "position_ids": positions}, [0])


def test_a_mask_of_ones_is_accepted() -> None:
    inputs = {"input_ids": tokens(2), "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)}
    assert list(capture(tiny_llama(), inputs, [1]).layers) == [1]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(implementation: str, fails: bool) -> None:
    model, inputs = tiny_llama(implementation), tokens()
    model.train()
    model.model.layers[0].eval()  # mixed modes come back as they were
    before = {name: module.training for name, module in model.named_modules()}
    if fails:
        with pytest.raises(ValueError, match="layers: expected numbers among"):
            capture(model, inputs, [5])
    else:
        capture(model, inputs, [0])
    assert model.config._attn_implementation == implementation
    assert {name: module.training for name, module in model.named_modules()} == before
    from transformers import AttentionInterface, AttentionMaskInterface

    assert "tilewise_capture" not in AttentionInterface() and "tilewise_capture" not in AttentionMaskInterface()


def test_a_file_gives_back_what_was_saved(tmp_path) -> None:
    path = tmp_path / "tiny.safetensors"
    result = capture(tiny_llama(), tokens(), [0, 1], path, query_rows=4, metadata={"source": "random"})
    loaded = load_capture(path)
    assert loaded.metadata == result.metadata and loaded.metadata["source"] == "random"
    assert list(loaded.layers) == [0, 1]
    for number, layer in loaded.layers.items():
        assert layer.q.dtype == torch.bfloat16
        assert (layer.scale, layer.causal, layer.window) == (result.layers[number].scale, True, None)
        assert all(torch.equal(getattr(layer, name), getattr(result.layers[number], name)) for name in "qkv")


def test_other_files_are_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, str(other))
    with pytest.raises(ValueError, match="expected a file of format"):
        load_capture(other)
    (tmp_path / "text").write_text("no tensors here, only words")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load_capture(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="found no file"):
        load_capture(tmp_path / "none.safetensors")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="query_rows"):
        capture(tiny_llama(), tokens(), [0], query_rows=0)
    with pytest.raises(NotImplementedError, match="PreTrainedModel"):
        capture(torch.nn.Identity(), tokens(), [0])


def test_the_shipped_sample_is_what_its_notice_says() -> None:
    sample: Capture = load_capture(sample_path())
    assert list(sample.layers) == [2, 14, 27]
    for layer in sample.layers.values():
        assert layer.q.shape == (1, 1024, 9, 64) and layer.k.shape == layer.v.shape == (1, 4096, 3, 64)
        assert {layer.q.dtype, layer.k.dtype, layer.v.dtype} == {torch.bfloat16}
        assert all(bool(x.isfinite().all()) for x in (layer.q, layer.k, layer.v))
        assert layer.scale == 0.125 and layer.causal and layer.window is None
    assert sample.metadata["query_positions"] == "3072:4096"
    assert sample.metadata["model_license"] == "Apache-2.0"
    digest = hashlib.sha256(sample_path().read_bytes()).hexdigest()
    assert digest in (sample_path().parent / "README.md").read_text()

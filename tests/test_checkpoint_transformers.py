"""Checkpoints pass between the transformers library and this one in both directions, in the library's own naming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from variants.checkpoint import Checkpoint, load_checkpoint
from variants.checkpoint_write import write_checkpoint
from variants.errors import InputError
from variants.model_config import LayerKind, ModelConfig

transformers = pytest.importorskip("transformers", reason="the transformers library is an optional dependency")

DENSE_NAMES = "dense MLP tensors are named as experts' (model.layers.0.block_sparse_moe.down_proj.weight, ...)"


@pytest.fixture(scope="module")
def model() -> Any:
    """A random model of odd sizes with two dense layers, in float32, its correction biases not zero."""
    config = transformers.KimiLinearConfig(
        vocab_size=97,
        hidden_size=44,
        intermediate_size=60,
        moe_intermediate_size=20,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=23,
        qk_nope_head_dim=14,
        qk_rope_head_dim=6,
        v_head_dim=10,
        num_local_experts=5,
        num_experts_per_tok=2,
        n_shared_experts=2,
        linear_head_dim=12,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        first_k_dense_replace=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = transformers.KimiLinearForCausalLM(config)
        for name, tensor in made.state_dict().items():
            if name.endswith(("e_score_correction_bias", "norm.weight")):
                tensor.normal_()
    return made


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "f32", max_shard_size="60KB")
    return tmp_path / "f32"


def in_memory(model: Any, config: ModelConfig) -> dict[str, Tensor]:
    """The model's tensors cut apart by hand into the release's names."""
    state, tensors = dict(model.state_dict()), {}
    for name, tensor in state.items():
        prefix = name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0]
        rows = config.kda_num_heads * config.kda_head_dim
        if name.endswith("self_attn.conv1d.weight"):
            for part, piece in zip("qkv", tensor.split(rows), strict=True):
                tensors[f"{prefix}.self_attn.{part}_conv1d.weight"] = piece
        elif name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                gate, up = fused.split(config.moe_intermediate_size)
                tensors[f"{prefix}.block_sparse_moe.experts.{expert}.w1.weight"] = gate
                tensors[f"{prefix}.block_sparse_moe.experts.{expert}.w3.weight"] = up
        elif name.endswith("mlp.experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}.block_sparse_moe.experts.{expert}.w2.weight"] = down
        elif ".mlp." in name and f"{prefix}.mlp.gate.weight" in state:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
        else:
            tensors[name.replace(".forget_gate.", ".")] = tensor
    return tensors


def assert_same_bits(loaded: Checkpoint, model: Any) -> None:
    expected = in_memory(model, loaded.config)
    assert loaded.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.tensors[name], tensor), name


def test_what_the_library_saves_in_shards_loads_bit_for_bit(model: Any, saved: Path) -> None:
    """Nine float32 shards hold the model's own bits; the dense layers' names, written as experts', get a note."""
    loaded = load_checkpoint(saved)
    assert len(list(saved.glob("model-*.safetensors"))) == 9
    assert_same_bits(loaded, model)
    assert loaded.notes == (f"6 {DENSE_NAMES}",)
    assert loaded.rounded == ()
    config = loaded.config
    assert config.layer_kinds == (LayerKind.kda,) * 4 + (LayerKind.mla,)
    assert config.moe_layers == (False, False, True, True, True)
    assert (config.kda_head_dim, config.kda_num_heads, config.conv_size) == (12, 3, 3)
    assert (config.max_length, config.num_experts, config.experts_per_token, config.num_shared_experts) == (
        128,
        5,
        2,
        2,
    )


def test_a_model_loaded_in_bfloat16_and_saved_names_its_rounded_decay(saved: Path) -> None:
    """The library keeps dt_bias, router and bias in float32 but rounds A_log: exactly the A_logs are named."""
    lower = transformers.KimiLinearForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    lower.save_pretrained(saved.parent / "bf16", max_shard_size="60KB")
    loaded = load_checkpoint(saved.parent / "bf16")
    assert_same_bits(loaded, lower)
    assert loaded.rounded == tuple(f"model.layers.{layer}.self_attn.A_log" for layer in range(4))
    assert loaded.notes[0] == f"6 {DENSE_NAMES}"
    assert loaded.notes[1].startswith("A_log is stored as bfloat16 in 4 layers")
    assert loaded.tensors["model.layers.2.block_sparse_moe.gate.weight"].dtype == torch.float32


def test_a_model_cast_to_bfloat16_and_saved_names_every_rounded_parameter(model: Any, saved: Path) -> None:
    """`.to(bfloat16)` spares nothing, and every float32 parameter of every layer is named."""
    lower = transformers.KimiLinearForCausalLM(model.config).to(torch.bfloat16)
    lower.save_pretrained(saved.parent / "cast")
    loaded = load_checkpoint(saved.parent / "cast")
    kinds = [name.rpartition(".")[2] for name in loaded.rounded]
    assert {kind: kinds.count(kind) for kind in kinds} == {"A_log": 4, "dt_bias": 4, "e_score_correction_bias": 3}
    assert len(loaded.notes) == 4


def test_the_in_memory_form_is_refused_with_the_way_out(model: Any, tmp_path: Path) -> None:
    """Fused names, which save_original_format=False writes, are refused and the message says how to save instead."""
    model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(InputError, match=r"unexpected tensor model\.layers.*save_original_format=True"):
        load_checkpoint(tmp_path)


def test_a_tied_flag_that_the_library_ignores_is_refused(tmp_path: Path, model: Any) -> None:
    """The library writes a head of its own under tie_word_embeddings = true: two models in one, so neither is taken."""
    config = transformers.KimiLinearConfig(**{**model.config.to_dict(), "tie_word_embeddings": True})
    transformers.KimiLinearForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"model\.safetensors: tensor lm_head\.weight differs from model\.embed_tokens"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("max_shard_bytes", [None, 60_000])
def test_the_library_loads_what_is_written_here(model: Any, saved: Path, max_shard_bytes: int | None) -> None:
    """A written checkpoint has every tensor the library looks for, no other, and the same bits and sizes."""
    copy = saved.parent / "copy"
    write_checkpoint(load_checkpoint(saved), copy, max_shard_bytes=max_shard_bytes)
    again, info = transformers.KimiLinearForCausalLM.from_pretrained(
        copy, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert load_checkpoint(copy).notes == ()

"""A config is read in either spelling and refused where it is silent, contradicts itself or asks for another model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from variants.checkpoint import expected_tensors, load_config
from variants.errors import InputError
from variants.model_config import LayerKind

SHIPPED = Path(__file__).parents[1] / "assets" / "kimi-linear-12m"
KDA = "linear_attn_config"
DROP = object()


@pytest.fixture
def release() -> dict[str, Any]:
    return json.loads((SHIPPED / "config.json").read_text())


@pytest.fixture
def library(release: dict[str, Any]) -> dict[str, Any]:
    """The same model in the field names of the transformers library."""
    nested = release.pop(KDA)
    for name in ("mla_use_nope", "moe_router_activation_func", "moe_layer_freq", "num_nextn_predict_layers"):
        del release[name]
    release["linear_head_dim"] = nested["head_dim"]
    release["linear_num_heads"] = nested["num_heads"]
    release["linear_conv_kernel_dim"] = nested["short_conv_kernel_size"]
    kinds = dict.fromkeys(nested["full_attn_layers"], "full_attention")
    release["layer_types"] = [kinds.get(layer, "linear_attention") for layer in range(1, 9)]
    release["mlp_layer_types"] = ["dense"] * release.pop("first_k_dense_replace") + ["sparse"] * 7
    for spelling, name in (
        ("max_position_embeddings", "model_max_length"),
        ("norm_topk_prob", "moe_renormalize"),
        ("n_group", "num_expert_group"),
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
    ):
        release[spelling] = release.pop(name)
    return release


def written(directory: Path, fields: dict[str, Any], changes: dict[str, Any] | None = None) -> Path:
    """Write config.json with dotted names set, or dropped where the value is DROP."""
    for name, value in (changes or {}).items():
        target, leaf = (fields[KDA], name.removeprefix(f"{KDA}.")) if name.startswith(f"{KDA}.") else (fields, name)
        target[leaf] = value
        if value is DROP:
            del target[leaf]
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_the_shipped_config_is_read_in_full() -> None:
    """Layers are 0-based, K = V where V is not stated, and the top-level head_dim of 72 shapes nothing."""
    config = load_config(SHIPPED)
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.mla] == [3, 7]
    assert config.moe_layers == (False, *[True] * 7)
    assert (config.kda_num_heads, config.kda_head_dim, config.kda_v_head_dim, config.conv_size) == (2, 128, 128, 4)
    assert (config.qk_head_dim, config.kv_lora_rank, config.v_head_dim, config.num_heads) == (192, 512, 128, 2)
    assert (config.num_experts, config.experts_per_token, config.num_shared_experts) == (8, 2, 1)
    assert (config.rms_norm_eps, config.routed_scaling_factor, config.renormalize) == (1e-5, 2.446, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (config.vocab_size, config.max_length, config.tie_word_embeddings) == (4096, 4096, False)
    assert all(72 not in shape for shape in expected_tensors(config).values())


def test_both_spellings_are_the_same_model(tmp_path: Path, library: dict[str, Any]) -> None:
    """The release's field names and the transformers library's give equal geometries."""
    assert KDA not in library
    assert load_config(written(tmp_path, library)) == load_config(SHIPPED)
    assert load_config(tmp_path / "config.json") == load_config(SHIPPED)


def test_values_may_be_wider_than_keys(tmp_path: Path, release: dict[str, Any]) -> None:
    """head_v_dim separates V from K, and each tensor follows the one it belongs to."""
    config = load_config(written(tmp_path, release, {f"{KDA}.head_v_dim": 160}))
    shapes = expected_tensors(config)
    assert (config.kda_head_dim, config.kda_v_head_dim) == (128, 160)
    widths = {
        name: shapes[f"model.layers.0.self_attn.{name}"][0] for name in ("q_proj.weight", "dt_bias", "v_proj.weight")
    }
    assert widths == {"q_proj.weight": 256, "dt_bias": 256, "v_proj.weight": 320}
    assert shapes["model.layers.0.self_attn.f_a_proj.weight"] == (160, 256)
    assert shapes["model.layers.0.self_attn.f_b_proj.weight"] == (256, 160)
    assert shapes["model.layers.0.self_attn.o_norm.weight"] == (160,)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (256, 320)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("model_type", DROP),
        ("architectures", ["DeepseekV3ForCausalLM"]),
        ("mla_use_nope", False),
        ("mla_use_nope", DROP),
        ("q_lora_rank", 64),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_expert_group", 2),
        ("topk_group", 2),
        ("n_group", 2),
        ("num_nextn_predict_layers", 1),
        ("moe_layer_freq", 2),
        ("hidden_act", "gelu"),
        ("moe_router_activation_func", "softmax"),
        ("attention_bias", True),
        ("num_key_value_heads", 1),
        (f"{KDA}.gate_lower_bound", -5.0),
        (f"{KDA}.num_v_heads", 4),
        ("kda_lower_bound", -5.0),
        ("hidden_size", "256"),
        ("hidden_size", 0),
        ("vocab_size", DROP),
        ("num_experts", True),
        ("num_experts_per_token", 9),
        ("num_experts_per_tok", 3),
        ("linear_head_dim", 64),
        ("moe_renormalize", 1),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", DROP),
        ("eos_token_id", [2, 3]),
        ("eos_token_id", 4096),
        (f"{KDA}.head_dim", DROP),
        (f"{KDA}.kda_layers", [1, 2, 3, 5, 6]),
        (f"{KDA}.kda_layers", [0, 1, 2, 4, 5, 6]),
        (f"{KDA}.kda_layers", [1, 2, 3, 4, 5, 6, 7]),
        (f"{KDA}.kda_layers", "all"),
        ("layer_types", ["linear_attention"] * 8),
        ("layer_types", ["sliding_attention"] * 8),
        ("layer_types", ["linear_attention"] * 7),
        ("mlp_layer_types", ["sparse"] * 8),
        ("first_k_dense_replace", DROP),
    ],
)
def test_what_is_not_this_model_is_refused_by_field(
    tmp_path: Path, release: dict[str, Any], name: str, value: object
) -> None:
    """A missing, ill-typed, contradicting or unsupported field is refused in one line that names file and field."""
    load_config(written(tmp_path, release))
    with pytest.raises(InputError, match=re.escape(name)) as caught:
        load_config(written(tmp_path, release, {name: value}))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_statement_about_layers_is_refused(tmp_path: Path, release: dict[str, Any]) -> None:
    """Without either form of the layer list there is no guess."""
    with pytest.raises(InputError, match=r"neither layer_types nor linear_attn_config\.kda_layers"):
        load_config(written(tmp_path, release, {f"{KDA}.kda_layers": DROP, f"{KDA}.full_attn_layers": DROP}))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    """Broken JSON, other JSON and other bytes are an input error that names the file."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json"):
        load_config(tmp_path)

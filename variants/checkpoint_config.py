"""Read `config.json` of a Kimi-Linear checkpoint, in the field names of the release or of the transformers library.

Nothing is guessed: a size that is not stated, two spellings that disagree, or an option that the model does not compute
is refused with the field's name.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from variants.errors import InputError
from variants.model_config import LayerKind, ModelConfig

_ARCHITECTURE = "KimiLinearForCausalLM"
_KDA = "linear_attn_config"
# transformers 5.24 (KimiLinearConfig) and DeepSeek spellings -> the release's.
_SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "linear_head_dim": f"{_KDA}.head_dim",
    "linear_num_heads": f"{_KDA}.num_heads",
    "linear_conv_kernel_dim": f"{_KDA}.short_conv_kernel_size",
}
# head_v_dim (V of the delta rule where it differs from K) is an extension: the release has V = K.
_KDA_FIELDS = ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "head_v_dim", "short_conv_kernel_size")
# Options that the model does not compute: field -> the values that leave it as it is (an absent field does too).
_FIXED: dict[str, tuple[object, ...]] = {
    "q_lora_rank": (None,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "num_nextn_predict_layers": (0, None),
    "moe_layer_freq": (1,),
    "hidden_act": ("silu",),
    "moe_router_activation_func": ("sigmoid",),
    "attention_bias": (False, None),
}


def load_config(path: str | Path) -> ModelConfig:
    """Read the geometry of a checkpoint directory, or of one `config.json`.

    The top-level `head_dim` is ignored: the release writes hidden_size // num_attention_heads there, no layer's width.
    Raises InputError naming the file and the field.
    """
    path = Path(path)
    file = path if path.is_file() else path / "config.json"
    fields = _Fields(file, read_json_object(file))
    _check_supported(fields)
    num_layers = fields.integer("num_hidden_layers")
    config = ModelConfig(
        layer_kinds=_layer_kinds(fields, num_layers),
        moe_layers=_moe_layers(fields, num_layers),
        renormalize=fields.boolean("moe_renormalize"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", absent=False),
        rms_norm_eps=fields.real("rms_norm_eps"),
        routed_scaling_factor=fields.real("routed_scaling_factor"),
        max_length=fields.integer("model_max_length"),
        **_sizes(fields),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_id=fields.token_id("eos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
    )
    if config.experts_per_token > config.num_experts:
        fields.refuse("num_experts_per_token", config.experts_per_token, f"at most num_experts = {config.num_experts}")
    return config


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises InputError where it is absent, unreadable or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); expected a checkpoint directory") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: holds a JSON {type(value).__name__}, expected an object")
    return value


class _Fields:
    """The fields of one config file under the release's names, nested KDA fields as `linear_attn_config.X`."""

    def __init__(self, file: Path, raw: dict[str, Any]) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        nested = raw.get(_KDA) or {}
        if not isinstance(nested, dict):
            self.refuse(_KDA, nested, "an object")
        self.is_release_form = bool(nested)
        spelled: dict[str, str] = {}
        flat: dict[str, Any] = {f"{_KDA}.{key}": value for key, value in nested.items()}
        for name, value in [*raw.items(), *flat.items()]:
            known = _SPELLINGS.get(name, name)
            if known in self.values and self.values[known] != value:
                self.refuse(name, value, f"the same as {spelled[known]} = {self.values[known]}")
            self.values[known], spelled[known] = value, name

    def refuse(self, name: str, got: object, expected: str) -> NoReturn:
        raise InputError(f"{self.file}: {name} is {json.dumps(got)}, expected {expected}")

    def required(self, name: str) -> Any:
        if name not in self.values:
            raise InputError(f"{self.file}: {name} is missing; a Kimi-Linear config states it")
        return self.values[name]

    def integer(self, name: str, *, least: int = 1) -> int:
        value = self.required(name)
        if type(value) is not int or value < least:
            self.refuse(name, value, f"an integer of at least {least}")
        return value

    def real(self, name: str) -> float:
        value = self.required(name)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.refuse(name, value, "a finite positive number")
        return float(value)

    def boolean(self, name: str, *, absent: bool | None = None) -> bool:
        value = self.required(name) if absent is None else self.values.get(name, absent)
        if type(value) is not bool:
            self.refuse(name, value, "true or false")
        return value

    def layer_numbers(self, name: str) -> list[int]:
        value = self.required(name)
        if not isinstance(value, list) or any(type(layer) is not int for layer in value):
            self.refuse(name, value, "a list of layer numbers, counted from 1")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.values.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < self.integer("vocab_size"):
            self.refuse(name, value, "one id inside the vocabulary, or null")
        return value


def _check_supported(fields: _Fields) -> None:
    if fields.values.get("model_type") != "kimi_linear":
        fields.refuse("model_type", fields.values.get("model_type"), '"kimi_linear", the one architecture known here')
    architectures = fields.values.get("architectures")
    if architectures is not None and architectures != [_ARCHITECTURE]:
        fields.refuse("architectures", architectures, f'["{_ARCHITECTURE}"]')
    for name, allowed in _FIXED.items():
        if name in fields.values and fields.values[name] not in allowed:
            fields.refuse(name, fields.values[name], f"{json.dumps(allowed[0])}: nothing else is supported")
    # transformers never rotates this model and does not write the field; in the release's own form absent means rope.
    if fields.values.get("mla_use_nope", not fields.is_release_form) is not True:
        fields.refuse("mla_use_nope", fields.values.get("mla_use_nope"), "true: rotary positions are not supported")
    if fields.values.get("num_key_value_heads") not in (None, fields.required("num_attention_heads")):
        fields.refuse("num_key_value_heads", fields.values["num_key_value_heads"], "num_attention_heads")
    for name, value in fields.values.items():
        # A bounded decay gate is another formula than this model's, and nothing but such a field tells them apart.
        unknown = name.startswith(f"{_KDA}.") and name.removeprefix(f"{_KDA}.") not in _KDA_FIELDS
        if value is not None and (unknown or "lower_bound" in name):
            fields.refuse(name, value, f"no such field: {_KDA} may hold {', '.join(_KDA_FIELDS)}")


def _sizes(fields: _Fields) -> dict[str, Any]:
    kda_head_dim = fields.integer(f"{_KDA}.head_dim")
    states_v = fields.values.get(f"{_KDA}.head_v_dim") is not None
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "kda_num_heads": fields.integer(f"{_KDA}.num_heads"),
        "kda_head_dim": kda_head_dim,
        "kda_v_head_dim": fields.integer(f"{_KDA}.head_v_dim") if states_v else kda_head_dim,
        "conv_size": fields.integer(f"{_KDA}.short_conv_kernel_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": fields.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": fields.integer("qk_rope_head_dim"),
        "v_head_dim": fields.integer("v_head_dim"),
        "num_experts": fields.integer("num_experts"),
        "experts_per_token": fields.integer("num_experts_per_token"),
        "num_shared_experts": fields.integer("num_shared_experts", least=0),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
    }


def _layer_kinds(fields: _Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """What mixes tokens in each layer, from `layer_types`, the two 1-indexed lists, or both where they agree."""
    types = fields.values.get("layer_types")
    by_word = {kind.value: kind for kind in LayerKind}
    listed = None if types is None else _from_types(fields, "layer_types", by_word, num_layers)
    if fields.values.get(f"{_KDA}.kda_layers") is None and fields.values.get(f"{_KDA}.full_attn_layers") is None:
        if listed is None:
            raise InputError(f"{fields.file}: neither layer_types nor {_KDA}.kda_layers is there; one is needed")
        return tuple(listed)
    kda, full = fields.layer_numbers(f"{_KDA}.kda_layers"), fields.layer_numbers(f"{_KDA}.full_attn_layers")
    if sorted([*kda, *full]) != list(range(1, num_layers + 1)):
        fields.refuse(f"{_KDA}.kda_layers + full_attn_layers", sorted([*kda, *full]), f"each of 1 to {num_layers} once")
    kinds = [LayerKind.kda if layer in set(kda) else LayerKind.mla for layer in range(1, num_layers + 1)]
    if listed is not None and listed != kinds:
        fields.refuse("layer_types", types, f"the layers of {_KDA} (both are stated and they differ)")
    return tuple(kinds)


def _moe_layers(fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers route to experts, from `mlp_layer_types`, `first_k_dense_replace`, or both where they agree."""
    types = fields.values.get("mlp_layer_types")
    kinds = {"dense": False, "sparse": True}
    listed = None if types is None else _from_types(fields, "mlp_layer_types", kinds, num_layers)
    if listed is not None and "first_k_dense_replace" not in fields.values:
        return tuple(listed)
    num_dense = fields.integer("first_k_dense_replace", least=0)
    counted = [layer >= num_dense for layer in range(num_layers)]
    if listed is not None and listed != counted:
        fields.refuse("mlp_layer_types", types, f"{num_dense} dense layers first, as first_k_dense_replace says")
    return tuple(counted)


def _from_types(fields: _Fields, name: str, kinds: dict[Any, Any], num_layers: int) -> Sequence[Any]:
    types = fields.values[name]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(kinds) for kind in types):
        fields.refuse(name, types, f"a list of {num_layers} (num_hidden_layers) words out of {', '.join(kinds)}")
    return [kinds[kind] for kind in types]

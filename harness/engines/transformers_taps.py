"""Values at named sites inside the transformers library's Kimi-Linear, recorded as it runs and never altered.

Module hooks see what enters and leaves each module. What the delta rule reads and leaves is seen by standing in for the
library's two core functions while the recording lasts. Values are copies in the dtype that the library holds them in.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from variants.errors import UsageError
from variants.model_config import LayerKind, ModelConfig
from variants.sites import ALL_SITES, EMBED

_CORES = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
# Sites that are not one value a token: a recording of several passes has no common time axis.
NOT_BY_TOKEN = ("kda_state", "mla_scores", "mla_probs", "kv_b_proj")

_LAYER_OUTPUTS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attn_norm", "": "mlp_residual"}
_KDA_OUTPUTS = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "b_proj": "b_proj",
    "g_a_proj": "g_a_proj",
    "g_b_proj": "g_b_proj",
    "forget_gate.f_a_proj": "f_a_proj",
    "forget_gate.f_b_proj": "f_b_proj",
    "forget_gate": "decay_gate",
    "o_norm": "o_norm",
    "o_proj": "o_proj",
}
_MLA_OUTPUTS = {
    "q_proj": "mla_q_proj",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "kv_b_proj",
    "o_proj": "o_proj",
}
_DENSE_OUTPUTS = {
    "gate_proj": "mlp_gate",
    "up_proj": "mlp_up",
    "act_fn": "mlp_silu",
    "down_proj": "mlp_down",
}
_MOE_OUTPUTS = {
    "experts": "routed",
    "shared_experts.gate_proj": "shared_gate",
    "shared_experts.up_proj": "shared_up",
    "shared_experts.act_fn": "shared_silu",
    "shared_experts.down_proj": "shared_down",
    "": "combine",
}
_ROUTER_OUTPUTS = ("router", "router_weights", "router_ids")


class Recording:
    """Values by (site, layer), one tensor for each pass of the model, in the order of the passes.

    Layers count from 0; the embedding has layer -1 and the head the number of layers. Values by token are [B, T, ...],
    `kda_state` [B, H, K, V] (after the pass), `mla_probs` [B, H, T, S].
    """

    def __init__(self, sites: frozenset[str]) -> None:
        self._sites = sites
        self._values: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The places that were recorded, in the order of their first value."""
        return tuple(self._values)

    def passes(self, site: str, layer: int) -> tuple[Tensor, ...]:
        """One value for each pass; raises UsageError where nothing was recorded."""
        if (site, layer) not in self._values:
            raise UsageError(f"no value was recorded at site {site!r} of layer {layer}")
        return tuple(self._values[site, layer])

    def by_token(self, site: str, layer: int) -> Tensor:
        """All passes in one tensor [B, T, ...], joined along T."""
        if site in NOT_BY_TOKEN:
            raise UsageError(f"site {site!r} is not one value a token; read it pass by pass")
        return torch.cat(self.passes(site, layer), dim=1)

    def add(self, site: str, layer: int, value: Tensor) -> None:
        if site in self._sites:
            self._values[site, layer].append(value.detach().clone())


@contextmanager
def record(model: Any, library: ModuleType, config: ModelConfig, sites: tuple[str, ...] | None) -> Iterator[Recording]:
    """Record `model` (a KimiLinearForCausalLM of `library`) while the context lasts; `sites` None means all it can see.

    Raises UsageError for a name that is no site.
    """
    if unknown := [site for site in sites or () if site not in ALL_SITES]:
        raise UsageError(f"taps: got site {unknown[0]!r}, expected one of {', '.join(ALL_SITES)}")
    recording = Recording(frozenset(ALL_SITES if sites is None else sites))
    with ExitStack() as stack:
        _hook_ends(stack, model, recording, config.num_layers)
        core = _CoreWatch(recording)
        for index, layer in enumerate(model.model.layers):
            _hook_layer(stack, layer, recording, index)
            if config.layer_kinds[index] is LayerKind.kda:
                _hook_kda(stack, layer.self_attn, recording, index)
                core.follow(stack, layer.self_attn, index)
            else:
                _hook_mla(stack, layer.self_attn, recording, index)
            hook_mlp = _hook_moe if config.moe_layers[index] else _hook_dense
            hook_mlp(stack, layer.mlp, recording, index)
        core.stand_in(stack, library)
        yield recording


def _hook_ends(stack: ExitStack, model: Any, recording: Recording, head: int) -> None:
    _on_output(stack, model.model.embed_tokens, lambda out: recording.add(EMBED, -1, out))
    _on_output(stack, model.model.norm, lambda out: recording.add("final_norm", head, out))
    _on_output(stack, model.lm_head, lambda out: recording.add("lm_head", head, out))


def _hook_layer(stack: ExitStack, layer: Any, recording: Recording, index: int) -> None:
    _hook_outputs(stack, layer, recording, index, _LAYER_OUTPUTS)
    _on_input(stack, layer.post_attention_layernorm, lambda x: recording.add("attn_residual", index, x))


def _hook_kda(stack: ExitStack, attention: Any, recording: Recording, index: int) -> None:
    _hook_outputs(stack, attention, recording, index, _KDA_OUTPUTS)
    _on_input(stack, attention.o_norm, lambda x: recording.add("kda_core", index, x))


def _hook_mla(stack: ExitStack, attention: Any, recording: Recording, index: int) -> None:
    def probs(out: Any) -> None:
        if out[1] is not None:  # only eager attention forms them
            recording.add("mla_probs", index, out[1])

    _hook_outputs(stack, attention, recording, index, _MLA_OUTPUTS)
    _on_output(stack, attention, probs)
    _on_input(stack, attention.o_proj, lambda x: recording.add("mla_core", index, x))


def _hook_dense(stack: ExitStack, mlp: Any, recording: Recording, index: int) -> None:
    _hook_outputs(stack, mlp, recording, index, _DENSE_OUTPUTS)
    _on_input(stack, mlp.down_proj, lambda x: recording.add("mlp_act", index, x))


def _hook_moe(stack: ExitStack, moe: Any, recording: Recording, index: int) -> None:
    def routed(out: Any) -> None:
        for site, value in zip(_ROUTER_OUTPUTS, out, strict=True):
            recording.add(site, index, value.unsqueeze(0))

    outputs = {name: site for name, site in _MOE_OUTPUTS.items() if name != "experts"}
    _hook_outputs(stack, moe, recording, index, outputs)
    _on_output(stack, moe.experts, lambda out: recording.add("routed", index, out.unsqueeze(0)))
    _on_output(stack, moe.gate, routed)
    _on_input(stack, moe.shared_experts.down_proj, lambda x: recording.add("shared_act", index, x))


def _hook_outputs(stack: ExitStack, owner: Any, recording: Recording, index: int, names: dict[str, str]) -> None:
    for name, site in names.items():
        _on_output(stack, owner.get_submodule(name), _adder(recording, site, index))


def _adder(recording: Recording, site: str, index: int) -> Callable[[Tensor], None]:
    return lambda out: recording.add(site, index, out)


def _on_output(stack: ExitStack, module: Any, see: Callable[[Any], None]) -> None:
    handle = module.register_forward_hook(lambda _module, _args, out: see(out))
    stack.callback(handle.remove)


def _on_input(stack: ExitStack, module: Any, see: Callable[[Any], None]) -> None:
    handle = module.register_forward_pre_hook(lambda _module, args: see(args[0]))
    stack.callback(handle.remove)


class _CoreWatch:
    """Stands in for the library's delta-rule functions and knows which layer is calling."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._layer = -1

    def follow(self, stack: ExitStack, attention: Any, index: int) -> None:
        """Remember `index` whenever this attention module begins."""
        handle = attention.register_forward_pre_hook(lambda _module, _args: setattr(self, "_layer", index))
        stack.callback(handle.remove)

    def stand_in(self, stack: ExitStack, library: ModuleType) -> None:
        for name in _CORES:
            original = getattr(library, name)
            stack.callback(setattr, library, name, original)
            setattr(library, name, self._watched(original))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def core(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            out, state = original(query, key, value, **options)
            joined = torch.cat([x.flatten(-2) for x in (query, key, value)], dim=-1)
            self._recording.add("short_conv", self._layer, joined)
            self._recording.add("beta", self._layer, options["beta"])
            if state is not None:
                self._recording.add("kda_state", self._layer, state)
            return out, state

        return core

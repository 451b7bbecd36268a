"""Layers over several devices: where each tensor lies, and that nothing is computed otherwise."""

from dataclasses import replace

import pytest
import torch
from tiny import ODD, plain, prompt, ragged

from harness.config import DeviceChoice, DeviceKind
from harness.engines.local import LocalEngine
from harness.numerics import check_device
from variants import decode
from variants.axes import Execution, ExecutionAxes, Gemm, Stream, Variant
from variants.checkpoint_names import expected_tensors
from variants.checkpoint_write import random_checkpoint
from variants.errors import DeviceError, UsageError
from variants.model import Model
from variants.model_config import ModelConfig
from variants.placement import Placement, one, spread
from variants.recipe import resolve
from variants.weights import Casts, Weights

DEEP = replace(ODD, layer_kinds=ODD.layer_kinds + ODD.layer_kinds[1:], moe_layers=(False, True, True, False, True))
F32 = plain(Stream.f32, Gemm.f32)


def model(placement: Placement, variant: Variant = F32, config: ModelConfig = DEEP) -> Model:
    made = Casts(random_checkpoint(config, seed=2), placement=placement)
    recipe = resolve(variant, config)
    return Model(config, recipe, Weights(made, recipe.semantics))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_are_consecutive_layers_and_hold_all_of_them(count: int) -> None:
    """Each device has a layer, none has two places, embedding and head are at the ends."""
    placed = spread(DEEP, [f"cuda:{i}" for i in range(count)])
    stages = placed.stages(DEEP.num_layers)
    assert [i for _, layers in stages for i in layers] == list(range(DEEP.num_layers))
    assert [d for d, _ in stages] == [f"cuda:{i}" for i in range(count)]
    assert all(len(layers) > 0 for _, layers in stages)
    assert placed.of("model.embed_tokens.weight") == "cuda:0"
    assert placed.of("lm_head.weight") == placed.of("model.norm.weight") == f"cuda:{count - 1}"
    for device, layers in stages:
        assert {placed.of(f"model.layers.{i}.input_layernorm.weight") for i in layers} == {device}


def test_stages_hold_about_the_same_weights() -> None:
    """Two devices: neither has more than half of all and the largest layer."""
    placed, held = spread(DEEP, ["a", "b"]), {"a": 0, "b": 0}
    for name, shape in expected_tensors(DEEP).items():
        held[placed.of(name)] += torch.Size(shape).numel()
    layer = max(
        sum(torch.Size(s).numel() for n, s in expected_tensors(DEEP).items() if n.startswith(f"model.layers.{i}."))
        for i in range(DEEP.num_layers)
    )
    assert max(held.values()) <= sum(held.values()) / 2 + layer


@pytest.mark.parametrize("mode", [Execution.incremental, Execution.recompute, Execution.paged])
@pytest.mark.parametrize("count", [2, 5])
def test_logits_over_several_devices_are_those_of_one(count: int, mode: Execution) -> None:
    """Rows of different lengths through prefill and decode: the same bits, whatever the number of stages."""
    variant = replace(F32, execution=ExecutionAxes(mode=mode, batch=2))
    prompts, forced = ragged([3, 6]), torch.tensor([5, 9])
    runs = [
        decode.steps(model(placed, variant), prompts, 3, lambda *_: forced)
        for placed in (one("cpu"), spread(DEEP, ["cpu"] * count))
    ]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(*runs, strict=True))


def test_weights_and_state_lie_where_their_layer_does() -> None:
    """With a second device that only has shapes, everything of its layers is there and nothing of the others."""
    placed = Placement(("cpu", "meta"), (0, 3))
    built = model(placed, config=replace(DEEP, moe_layers=(False,) * 5))
    state = built.new_state(slots=1, max_len=8)
    stores = {**state.conv, **state.recurrent, **state.latent}
    assert {i: x.device.type for i, x in stores.items()} == {0: "cpu", 1: "cpu", 2: "cpu", 3: "meta", 4: "meta"}
    phase = built.phases["decode"]
    assert [x.input_norm.weight.device.type for x in phase.layers] == ["cpu"] * 3 + ["meta"] * 2
    assert (phase.embedding.device.type, phase.final_norm.weight.device.type) == ("cpu", "meta")
    logits = decode.prefill(built, state, [0], [prompt(4)])
    assert logits.device.type == "meta", "the stream was moved"


def test_random_weights_are_the_same_however_they_are_placed() -> None:
    """A tensor's values depend on its name and the seed, not on what lies beside it."""
    whole, parts = (random_checkpoint(DEEP, seed=4, placement=p) for p in (one("cpu"), spread(DEEP, ["cpu", "cpu"])))
    assert all(torch.equal(whole.tensors[n], parts.tensors[n]) for n in whole.tensors)


def test_what_cannot_be_placed_is_refused() -> None:
    """More devices than layers or than there are, several on the CPU, and a fused step over two."""
    with pytest.raises(UsageError, match="pipeline=6: the model has 5 layers"):
        spread(DEEP, ["cpu"] * 6)
    with pytest.raises(UsageError, match="pipeline=2 has no effect or cannot be: the cpu is one device"):
        DeviceChoice(pipeline=2)
    with pytest.raises(UsageError, match="pipeline=0"):
        DeviceChoice(pipeline=0)
    with pytest.raises(DeviceError, match="cuda:98 is not there"):
        check_device(DeviceChoice(kind=DeviceKind.cuda, index=90, pipeline=9))
    assert DeviceChoice(kind=DeviceKind.cuda, index=1, pipeline=2).names == ("cuda:1", "cuda:2")


@pytest.mark.parametrize("name", ["fast_decode_fused", "paged_engine_graph"])
def test_a_fused_step_and_a_graph_are_on_one_device(name: str) -> None:
    """Their buffers have one home; the refusal says what would work."""
    from harness.compose import named_variant

    made = Casts(random_checkpoint(DEEP, seed=2), placement=spread(DEEP, ["cpu", "cpu"]))
    with pytest.raises(UsageError, match=r"set device.pipeline=1"):
        LocalEngine(made, named_variant(name), name="x")

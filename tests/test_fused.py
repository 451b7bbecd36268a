"""A fused decode step under the interpreter: the bits of its launches one by one, refused where it cannot be."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import ODD, SMALL, build, casts
from torch import Tensor

from experiments.cli import main
from harness.compose import named_variant
from variants.axes import Graph, Impl, SiteOverride, Store, Variant
from variants.errors import DeviceError, UsageError
from variants.fused import FusedStep
from variants.fused_step import fused_step
from variants.model import Model
from variants.model_config import ModelConfig
from variants.ops import row_mix_triton, row_triton
from variants.state import State

TOKENS = [5]


@cache
def variant(*, fused: bool) -> Variant:
    """fast_decode_plain or its fused form, with fewer runs of keys: the interpreter pays for each."""
    plain = named_variant("fast_decode_plain")
    return replace(
        plain,
        mla=replace(plain.mla, kv_splits=2, tile_k=16, tile_q=16),
        execution=replace(plain.execution, fused=fused),
    )


def begun(model: Model, position: int) -> State:
    """A slot that carries random values, as if so many tokens had run."""
    state, random = model.new_state(slots=2, max_len=40), torch.Generator().manual_seed(3)
    for store in (state.conv, state.recurrent, state.latent):
        for layer, x in store.items():
            store[layer] = torch.randn(x.shape, generator=random).to(x.dtype)
    state.length = [0, position]
    return state


def decoded(model: Model, *, position: int = 19) -> tuple[Tensor, State]:
    """Logits [T, V] of forced tokens in slot 1, and the state after them."""
    state = begun(model, position)
    rows = [
        model.forward(torch.tensor([[t]]), state, slots=[1], lengths=[1], phase="decode")[0].clone() for t in TOKENS
    ]
    return torch.stack(rows), state


TWO = replace(ODD, layer_kinds=ODD.layer_kinds[:2], moe_layers=(False, True))


@pytest.mark.parametrize("config", [pytest.param(SMALL, marks=pytest.mark.slow), TWO], ids=["two shared", "K != V"])
def test_a_fused_step_has_the_bits_of_its_launches_one_by_one(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and everything carried, in a slot that is not the first; programs take small tiles in turn."""
    monkeypatch.setattr(row_triton, "TILE", 256)
    monkeypatch.setattr(row_mix_triton, "UP_TILE", 128)
    monkeypatch.setattr(row_mix_triton, "SLOT_TILE", 128)
    made = casts(config)
    (plain, before), (fused, after) = (decoded(build(variant(fused=f), made)) for f in (False, True))
    assert torch.equal(plain, fused)
    assert bool(torch.isfinite(plain).all())
    assert before.length == after.length == [0, 19 + len(TOKENS)]
    for name in ("conv", "recurrent", "latent"):
        ours, theirs = getattr(before, name), getattr(after, name)
        assert all(torch.equal(ours[i], theirs[i]) for i in ours), name


def test_the_device_chooses_what_the_host_would_and_goes_on() -> None:
    """Tokens that are fed back without the host are the largest logits of the plain path, the lowest id on ties."""
    made = casts(SMALL)
    model, plain = build(variant(fused=True), made), build(variant(fused=False), made)
    state, other = begun(model, 19), begun(plain, 19)
    step = fused_step(model, state, 1, model._steps)
    assert isinstance(step, FusedStep)
    step.begin(torch.tensor([5]), 19)
    step.run(2)
    token, wanted = 5, []
    for _ in range(2):
        logits = plain.forward(torch.tensor([[token]]), other, slots=[1], lengths=[1], phase="decode")
        token = int(logits.float().argmax())
        wanted.append(token)
    assert step.taken(2) == wanted
    assert int(step.buffers.position) == 21


def test_a_step_is_bound_again_where_the_state_was_exchanged() -> None:
    """A reset makes new tensors: the old list would write to what nobody reads."""
    model = build(variant(fused=True), casts(SMALL))
    state = begun(model, 4)
    first = fused_step(model, state, 1, model._steps)
    assert fused_step(model, state, 1, model._steps) is first
    state.reset([1])
    assert fused_step(model, state, 1, model._steps) is not first


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    """The last position is the state's; one more is one line."""
    model = build(variant(fused=True), casts(SMALL))
    with pytest.raises(UsageError, match="41 tokens does not fit max_len=40"):
        decoded(model, position=40)


REFUSED = [
    ("execution.fused", {"impl": replace(named_variant("fast_decode").impl, conv=Impl.triton)}),
    ("execution.fused", {"override": {"o_proj": SiteOverride(output=Store.f32)}}),
    ("execution.fused", {"execution": replace(named_variant("fast_decode").execution, batch=2)}),
    ("execution.graph", {"execution": replace(named_variant("fast_decode").execution, fused=False)}),
]


@pytest.mark.parametrize(("setting", "changed"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_fused_is_refused(setting: str, changed: dict) -> None:
    """Another implementation, an override, more rows, a graph of nothing."""
    with pytest.raises(UsageError, match=setting):
        replace(named_variant("fast_decode"), **changed)


def test_a_graph_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a CPU the axis is refused in one line, before anything runs."""
    assert named_variant("fast_decode").execution.graph is Graph.cuda
    assert main(["gate", "variant=fast_decode", "limit=1", f"results={tmp_path}"]) == DeviceError.exit_code
    said = capsys.readouterr().err
    assert "execution.graph=cuda needs a CUDA device" in said
    assert said.count("\n") == 1

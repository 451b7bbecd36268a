"""vllm_mirror: the rounding points of vLLM's kernels in torch, and the three of them that no other variant has."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_ops_kda import drawn
from tiny import ODD, build, casts, forced, prompt, relative
from torch import Tensor

from harness.compose import named_variant
from variants.axes import ChunkForm, Order, TileOrder, Variant
from variants.ops import kda, mla
from variants.recipe import resolve
from variants.site_overrides import silent_keys

MIRROR, EXACT = named_variant("vllm_mirror"), named_variant("vllm_exact_flash")
PLAIN = replace(MIRROR.kda, chunk_form=ChunkForm.plain)
CHANGES: dict[str, Variant] = {
    "chunks in the plain form": replace(MIRROR, kda=PLAIN),
    "the down product rounded before its weight": replace(MIRROR, moe=replace(MIRROR.moe, weighting=Order.stepwise)),
}


def test_every_site_rounds_as_vllms_kernels_do() -> None:
    """Where a value leaves a site of either recipe it has one format in both, whoever computes it."""
    ours, theirs = (resolve(v, ODD) for v in (MIRROR, EXACT))
    keys = [k for k in ours.rules if k not in silent_keys(MIRROR) and not k.endswith("_in")]
    formats = {k: (ours.rules[k].output, theirs.rules[k].output) for k in keys}
    wide = {"conv_state", "router_scores", "router_weights"}  # kept as they are computed: the same without a rounding
    assert {k: f for k, f in formats.items() if f[0] is not f[1] and k not in wide} == {}
    assert ours.semantics == theirs.semantics
    assert (ours.fused_gate_up, ours.reduced_sums) == (theirs.fused_gate_up, theirs.reduced_sums)


@pytest.mark.parametrize("change", CHANGES)
def test_each_point_changes_logits(change: str) -> None:
    """Without it the same prompt gives other logits."""
    made, prompts, tokens = casts(), [prompt(70)], [prompt(2, seed=9)]
    own, other = (forced(build(v, made), prompts, tokens) for v in (MIRROR, CHANGES[change]))
    assert not torch.equal(own, other)


def test_scores_in_blocks_are_the_scores() -> None:
    """But for operands cut to TF32, in blocks left of the diagonal alone, the form is the plain core."""
    x = drawn(2, 70, 2, 20, 12).to(torch.float32)
    form, plain = (kda.chunk(*x, chunk_size=64, form=f) for f in (1, 0))
    assert 1e-6 < relative(form[0], plain[0]) < 2**-10
    short, same = (kda.chunk(*x.cut(0, 16, x.state), chunk_size=64, form=f)[0] for f in (1, 0))
    assert relative(short, same) < 1e-6


def test_the_scores_take_the_query_before_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's form the scaled query is rounded for the output alone; the plain form rounds it everywhere."""
    monkeypatch.setattr(kda, "tf32", lambda x: x)
    x = drawn(1, 20, 1, 20, 12).to(torch.float32)
    seen: dict[str, Tensor] = {}

    def at(name: str) -> dict[str, Callable[[Tensor], Tensor]]:
        return {"kda_q_scaled": lambda q: q.bfloat16(), "kda_aqk": lambda a: seen.setdefault(name, a)}

    for name, form, hooks in (("exact", 0, {}), ("plain", 0, at("plain")), ("vllm", 1, at("vllm"))):
        more = hooks or {"kda_aqk": lambda a: seen.setdefault("exact", a)}
        kda.chunk(*x, chunk_size=64, form=form, at=more)
        assert name in seen
    assert relative(seen["vllm"], seen["exact"]) < 1e-6 < 1e-4 < relative(seen["plain"], seen["exact"])


def test_tf32_cuts_off_thirteen_bits() -> None:
    """Towards zero, whatever the sign; what has eleven bits stays."""
    x = torch.tensor([1 + 2**-10, 1 + 2**-10 + 2**-11, -1 - 2**-11, 0.0])
    assert kda.tf32(x).tolist() == [1 + 2**-10, 1 + 2**-10, -1.0, 0.0]


def test_the_order_of_tiles_is_seen_where_probabilities_are_rounded() -> None:
    """From the last tile to the first, the same function in float64; rounded, other bits than from the first."""
    torch.manual_seed(0)
    q, q_pe, latent = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 3), torch.randn(1, 40, 11)
    where = torch.tensor([[39]])

    def run(backward: int, dtype: torch.dtype, *, rounded: bool) -> Tensor:
        at = {"mla_probs": lambda p: p.bfloat16()} if rounded else {}
        a, b, c = (x.to(dtype) for x in (q, q_pe, latent))
        return mla.absorbed(a, b, c, where, scale=0.3, tile_k=16, kv_splits=2, rank=8, backward=backward, at=at)

    assert relative(run(1, torch.float64, rounded=False), run(0, torch.float64, rounded=False)) < 1e-15
    assert not torch.equal(run(1, torch.float32, rounded=True), run(0, torch.float32, rounded=True))
    assert MIRROR.mla.tile_order is TileOrder.backward

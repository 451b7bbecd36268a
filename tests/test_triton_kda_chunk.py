"""The chunked delta rule kernels against the float64 reference and its named roundings."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_case import DEVICE, LENGTHS, LONG, DeltaCase, agrees, delta_case, draw, error
from variants.errors import UsageError
from variants.ops import kda
from variants.ops.kda_chunk_triton import FLA, VLLM, Cumsum, Rounding, ScaleAt, chunk
from variants.ops.kda_triton import Fused
from variants.ops.launch_triton import Precision, ragged
from variants.sites import CHUNK_SITES

pytestmark = pytest.mark.usefixtures("poisoned")
EXACT = Rounding()
# float32 sums through the inverse of a chunk, whose condition the keys set
CHUNK_F32_BOUND = 2e-5


def fused(case: DeltaCase) -> Fused:
    return Fused(normalize=True, a_log=case.a_log, dt_bias=case.dt_bias, sigmoid=True, scale=case.scale)


def run(case: DeltaCase, **more: object) -> tuple[Tensor, Tensor]:
    return chunk(case.q, case.k, case.v, case.f, case.beta, case.state, fused=fused(case), **more)  # pyright: ignore


def check_length(length: int, heads: int, width: int, v_width: int) -> None:
    case = delta_case(length, heads=heads, width=width, v_width=v_width)
    before = case.state.clone()
    (o, state), (o_ref, state_ref) = run(case), case.reference()
    assert agrees(o, o_ref, CHUNK_F32_BOUND), error(o, o_ref)
    assert agrees(state, state_ref, CHUNK_F32_BOUND), error(state, state_ref)
    assert torch.equal(case.state, before), "without a batch the state that was given is not changed"
    again, state_again = run(case)
    assert torch.equal(o, again)
    assert torch.equal(state, state_again)
    mutant, _ = case.changed(dt_bias=case.dt_bias * 1.01).reference()
    assert not agrees(o, mutant, CHUNK_F32_BOUND), "a gate bias off by 1 % must be seen"


@pytest.mark.parametrize("length", [1, 65])
def test_chunk_is_the_reference_in_float32(length: int) -> None:
    """With everything fused and K != V, output and state are within float32 rounding of the step-by-step rule."""
    check_length(length, heads=1, width=20, v_width=12)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_chunk_is_the_reference_at_every_length(length: int) -> None:
    """The same at the lengths around a chunk, over several blocks of K."""
    check_length(length, heads=2, width=72, v_width=40)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LONG)
def test_chunk_is_the_reference_at_model_size(length: int) -> None:
    """The same at the released head width, and at K 128, V 192."""
    check_length(length, heads=4, width=128, v_width=128)
    check_length(length, heads=3, width=128, v_width=192)


def hooks(*sites: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(sites, lambda x: x.to(torch.bfloat16).to(x.dtype))


def prepared(case: DeltaCase) -> list[Tensor]:
    return [x.float().to(DEVICE) for x in case.prepared()]


def check_site(sites: tuple[str, ...], length: int, closer: float) -> None:
    case = delta_case(length, heads=1, width=16, v_width=24)
    operands = prepared(case)
    wide = [x.double().cpu() for x in operands]
    rounding = replace(EXACT, **dict.fromkeys(sites, torch.bfloat16))
    o, state = chunk(*operands, rounding=rounding)  # pyright: ignore[reportArgumentType]
    o_ref, state_ref = kda.chunk(*wide, chunk_size=64, at=hooks(*sites))  # pyright: ignore[reportArgumentType]
    o_wide, state_wide = kda.chunk(*wide, chunk_size=64)  # pyright: ignore[reportArgumentType]
    both, reference, unrounded = (torch.cat([x.cpu().flatten(), y.cpu().flatten()])
                                  for x, y in ((o, state), (o_ref, state_ref), (o_wide, state_wide)))  # fmt: skip
    assert error(both, unrounded) > 2e-5, "the rounding is there"
    assert error(both, reference) < closer * error(both, unrounded), "and it is the reference's rounding"


@pytest.mark.slow
@pytest.mark.parametrize("site", CHUNK_SITES)
def test_each_named_site_rounds_as_the_reference_does(site: str) -> None:
    """One site in bfloat16: the kernel is ten times closer to the reference rounded at that site than to the exact
    one (a few elements lie so near a tie that float32 and float64 round them apart)."""
    check_site((site,), length=70, closer=0.1)


def test_all_sites_round_as_the_reference_does() -> None:
    """Every site in bfloat16 at once: still far closer to the reference with those roundings than to the exact one."""
    check_site(CHUNK_SITES, length=66, closer=0.3)


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def rounded_reference(case: DeltaCase) -> Tensor:
    """The float64 chunked rule with every rounding of the engines: q and k normed, all sites, the output."""
    q, k, *rest = case.prepared()
    q, k = bf16(q / case.scale) * case.scale, bf16(k)
    return bf16(kda.chunk(q, k, *rest, chunk_size=64, at=hooks(*CHUNK_SITES))[0])  # pyright: ignore


@pytest.mark.parametrize("rounding", [VLLM, FLA], ids=["vllm", "fla"])
def test_engine_roundings_err_as_much_as_those_roundings_must(rounding: Rounding) -> None:
    """With an engine's roundings the error is that of the float64 rule with bfloat16 at the same places, within a
    quarter: tf32 products, the place of the scale and the order of the sums add no more."""
    case = delta_case(66, heads=1, width=24, v_width=16, dtype=torch.bfloat16)
    o, _ = run(case, rounding=rounding, out_dtype=torch.bfloat16)
    exact, _ = case.reference()
    due = error(rounded_reference(case), exact)
    assert due / 1.25 < error(o, exact) < due * 1.25, (error(o, exact), due)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"scale_at": ScaleAt.product}, {"scale_at": ScaleAt.sum}, {"cumsum": Cumsum.dot}, {"base2": True},
     {"scores": Precision.tf32x3, "merge": Precision.tf32x3, "products": Precision.tf32x3}],
    ids=["scale_product", "scale_sum", "cumsum_dot", "base2", "tf32x3"],
)  # fmt: skip
def test_orders_of_arithmetic_are_the_same_function(change: dict[str, object]) -> None:
    """Where the scale enters, how the decay is summed and its base move float32 bits and nothing else."""
    case = delta_case(66, heads=1, width=20, v_width=8)
    o, state = run(case, rounding=replace(EXACT, **change))  # pyright: ignore[reportArgumentType]
    o_ref, state_ref = case.reference()
    assert agrees(o, o_ref, CHUNK_F32_BOUND), error(o, o_ref)
    assert agrees(state, state_ref, CHUNK_F32_BOUND)


def test_strong_decay_neither_overflows_nor_turns_nan() -> None:
    """A decay of e^-200 a token: every exponent the kernels form is at or below zero, so the output is exact still."""
    case = delta_case(66, heads=1, width=16, v_width=8)
    case = case.changed(a_log=torch.full_like(case.a_log, 4.0), dt_bias=torch.full_like(case.dt_bias, 4.0))
    o, state = run(case)
    o_ref, state_ref = case.reference()
    assert agrees(o, o_ref, CHUNK_F32_BOUND)
    assert agrees(state, state_ref, CHUNK_F32_BOUND)


def test_eps_of_the_norm_is_inside_the_root_and_on_the_sum() -> None:
    """Where q and k are as small as the root of eps, its place and size decide the norm; it is the reference's."""
    case = delta_case(2, heads=1, width=16, v_width=8)
    case = case.changed(q=case.q * 3e-4, k=case.k * 3e-4)
    o, _ = run(case)
    assert agrees(o, case.reference()[0], CHUNK_F32_BOUND)


def test_a_packed_batch_is_its_sequences_alone() -> None:
    """In a ragged batch each sequence has the bits it has alone, its state lands in its slot, and no other slot is
    touched; padding (slot -1) gives zeros even where its inputs are NaN."""
    lengths, slots = (17, 2, 65), (3, -1, 0)
    case = delta_case(sum(lengths), heads=1, width=16, v_width=8)
    for x in (case.q, case.k, case.v, case.f, case.beta):
        x[:, 17:19] = float("nan")
    pool = draw(5, 1, 16, 8, seed=9)
    before, batch = pool.clone(), ragged(lengths, slots, device=DEVICE)
    o, returned = chunk(case.q, case.k, case.v, case.f, case.beta, pool, batch=batch, fused=fused(case))
    assert returned is pool
    start = 0
    for n, slot in zip(lengths, slots, strict=True):
        part = slice(start, start + n)
        start += n
        if slot < 0:
            assert bool((o[:, part] == 0).all())
            continue
        one = [x[:, part] for x in (case.q, case.k, case.v, case.f, case.beta)]
        alone, state = chunk(*one, before[slot : slot + 1], fused=fused(case))  # pyright: ignore
        assert torch.equal(o[:, part], alone)
        assert torch.equal(pool[slot], state[0])
    idle = [1, 2, 4]
    assert torch.equal(pool[idle], before[idle])


def test_other_chunk_sizes_are_refused() -> None:
    """The kernels have chunks of 64 tokens only, and say so."""
    with pytest.raises(UsageError, match="take chunk_size 64 and K up to 256, got 32"):
        run(delta_case(2, heads=1, width=16, v_width=8), chunk_size=32)

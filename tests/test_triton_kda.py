"""The recurrent delta rule kernel against the float64 reference."""

import pytest
import torch

from tests.triton_case import DEVICE, F32_BOUND, LENGTHS, LONG, DeltaCase, agrees, delta_case, error
from variants.errors import UsageError
from variants.ops.kda_triton import Fused, recurrent
from variants.ops.launch_triton import ragged

pytestmark = pytest.mark.usefixtures("poisoned")


def fused(case: DeltaCase) -> Fused:
    return Fused(normalize=True, a_log=case.a_log, dt_bias=case.dt_bias, sigmoid=True, scale=case.scale)


def run(case: DeltaCase, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    return recurrent(case.q, case.k, case.v, case.f, case.beta, case.state, fused=fused(case), **more)  # pyright: ignore


def check_length(length: int, heads: int, width: int, v_width: int) -> None:
    case = delta_case(length, heads=heads, width=width, v_width=v_width)
    before = case.state.clone()
    (o, state), (o_ref, state_ref) = run(case), case.reference()
    assert agrees(o, o_ref, F32_BOUND), error(o, o_ref)
    assert agrees(state, state_ref, F32_BOUND), error(state, state_ref)
    assert torch.equal(case.state, before), "without a batch the state that was given is not changed"
    again, state_again = run(case)
    assert torch.equal(o, again)
    assert torch.equal(state, state_again)
    mutant, _ = case.changed(dt_bias=case.dt_bias * 1.001).reference()
    assert not agrees(o, mutant, F32_BOUND), "a gate bias off by 0.1 % must be seen"


@pytest.mark.parametrize("length", [1, 5])
def test_recurrent_is_the_reference_in_float32(length: int) -> None:
    """With everything fused, K != V and neither a power of two, output and state are within float32 rounding."""
    check_length(length, heads=2, width=20, v_width=11)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_recurrent_is_the_reference_at_every_length(length: int) -> None:
    """The same at the lengths around a chunk."""
    check_length(length, heads=1, width=24, v_width=8)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LONG)
def test_recurrent_is_the_reference_at_model_size(length: int) -> None:
    """The same at the released head width, and at K 128, V 192."""
    check_length(length, heads=4, width=128, v_width=128)
    check_length(length, heads=3, width=128, v_width=192)


def test_plain_operands_mean_what_they_mean_in_the_reference() -> None:
    """Nothing fused: q, k, g and beta are taken as given."""
    case = delta_case(4, heads=1, width=16, v_width=24, rows=2)
    q, k, v, g, beta, state = case.prepared()
    narrow = [x.float().to(DEVICE) for x in (q, k, v, g, beta, state)]
    o, state = recurrent(*narrow)  # pyright: ignore[reportArgumentType]
    o_ref, state_ref = case.reference()
    assert agrees(o, o_ref, F32_BOUND)
    assert agrees(state, state_ref, F32_BOUND)


def test_eps_of_the_norm_is_inside_the_root_and_on_the_sum() -> None:
    """Where q and k are as small as the root of eps, its place and size decide the norm; it is the reference's."""
    case = delta_case(2, heads=1, width=16, v_width=8)
    case = case.changed(q=case.q * 3e-4, k=case.k * 3e-4)
    o, state = run(case)
    o_ref, state_ref = case.reference()
    assert agrees(o, o_ref, F32_BOUND)
    assert agrees(state, state_ref, F32_BOUND)


def test_bf16_output_is_rounded_once() -> None:
    """With bfloat16 operands the only further rounding is of the output: it is the float32 output, rounded."""
    case = delta_case(3, heads=1, width=16, v_width=8, dtype=torch.bfloat16)
    wide, state = run(case)
    narrow, state_again = run(case, out_dtype=torch.bfloat16)
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    assert torch.equal(state, state_again)
    assert agrees(wide, case.reference()[0], F32_BOUND)


def test_a_packed_batch_is_its_sequences_alone() -> None:
    """In a ragged batch each sequence has the bits it has alone, its state lands in its slot, and no other slot is
    touched; padding (slot -1) gives zeros even where its inputs are NaN."""
    lengths, slots = (1, 4, 2, 3), (3, 0, -1, 5)
    case = delta_case(10, heads=2, width=16, v_width=12)
    for x in (case.q, case.f, case.beta):
        x[:, 5:7] = float("nan")
    pool = delta_case(1, heads=2, width=16, v_width=12, rows=6).state
    before, batch = pool.clone(), ragged(lengths, slots, device=DEVICE)
    o, returned = recurrent(case.q, case.k, case.v, case.f, case.beta, pool, batch=batch, fused=fused(case))
    assert returned is pool
    start = 0
    for n, slot in zip(lengths, slots, strict=True):
        part = slice(start, start + n)
        start += n
        if slot < 0:
            assert bool((o[:, part] == 0).all())
            continue
        one = [x[:, part] for x in (case.q, case.k, case.v, case.f, case.beta)]
        alone, state = recurrent(*one, before[slot : slot + 1], fused=fused(case))  # pyright: ignore
        assert torch.equal(o[:, part], alone)
        assert torch.equal(pool[slot], state[0])
    idle = [1, 2, 4]
    assert torch.equal(pool[idle], before[idle])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(1, 2, 1, 8, dtype=torch.float64)}, "v is float64, expected one of"),
        ({"state": torch.zeros(1, 1, 16, 8, dtype=torch.bfloat16)}, "state is bfloat16, expected one of: float32"),
        ({"state": torch.zeros(1, 1, 8, 16)}, r"state has shape \[1, 1, 8, 16\], expected \[1, 1, 16, 8\]"),
        ({"beta": torch.zeros(1, 3, 1)}, r"beta has shape \[1, 3, 1\]"),
    ],
)
def test_what_the_kernel_lacks_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    """A dtype or shape that the kernel does not take stops with what was got and what was expected."""
    case = delta_case(2, heads=1, width=16, v_width=8)
    case = case.changed(**{name: x.to(DEVICE) for name, x in change.items()})
    with pytest.raises(UsageError, match=message):
        run(case)


def test_two_sequences_may_not_own_one_slot() -> None:
    """A packed batch in which a slot stands twice is refused; padding may stand twice."""
    ragged([1, 1], [-1, -1], device=DEVICE)
    with pytest.raises(UsageError, match="own one state slot"):
        ragged([1, 1], [2, 2], device=DEVICE)

"""The short convolution kernels against the float64 reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_case import DEVICE, F32_BOUND, LENGTHS, LONG, agrees, draw
from variants.errors import UsageError
from variants.ops.conv import next_state, taps
from variants.ops.conv_triton import short_conv
from variants.ops.launch_triton import ragged

pytestmark = pytest.mark.usefixtures("poisoned")


def reference(raw: Tensor, weight: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: raw [T, C], carried [W - 1, C] -> SiLU of the taps in float64, and the inputs to carry."""
    window = torch.cat([carried, raw]).unsqueeze(0)
    out = F.silu(taps(window.double().cpu(), weight.double().cpu()))[0]
    return out, next_state(window, [raw.shape[0]], carried.shape[0])[0]


def check_length(length: int, channels: int) -> None:
    raw, weight, pool = draw(length, channels, seed=1), draw(channels, 4, seed=2), draw(3, 3, channels, seed=3)
    before = pool.clone()
    out = short_conv(raw, weight, pool, batch=ragged([length], [1], device=DEVICE))
    expected, carried = reference(raw, weight, before[1])
    assert agrees(out, expected, F32_BOUND)
    assert torch.equal(pool[1], carried), "the carried inputs are copies"
    assert torch.equal(pool[[0, 2]], before[[0, 2]])
    mutant, _ = reference(raw, weight, before[0])
    assert not agrees(out[:1], mutant[:1], F32_BOUND), "another slot's inputs must be seen"


@pytest.mark.parametrize("length", LENGTHS)
def test_conv_is_the_reference(length: int) -> None:
    """At every length, also under the filter's, output and carried inputs are the reference's."""
    check_length(length, 35)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LONG)
def test_conv_is_the_reference_at_model_size(length: int) -> None:
    """The same with many blocks of channels."""
    check_length(length, 3 * 4096 + 8)


def test_update_has_the_bits_of_prefill() -> None:
    """Tokens that arrive one by one get the bits they get in one piece, and leave the same carried inputs."""
    raw, weight = draw(6, 20, seed=1, dtype=torch.bfloat16), draw(20, 4, seed=2)
    whole, single = torch.zeros(1, 3, 20, device=DEVICE), torch.zeros(1, 3, 20, device=DEVICE)
    out = short_conv(raw, weight, whole, batch=ragged([6], [0], device=DEVICE), out_dtype=torch.bfloat16)
    for t in range(6):
        one = short_conv(raw[t : t + 1], weight, single, batch=ragged([1], [0], device=DEVICE),
                         out_dtype=torch.bfloat16)  # fmt: skip
        assert torch.equal(one[0], out[t])
    assert torch.equal(whole, single)


def test_padding_touches_no_slot() -> None:
    """A sequence of slot -1 gives zeros, even from NaN, and leaves every slot as it was; others are not disturbed."""
    raw, weight, pool = draw(5, 20, seed=1), draw(20, 4, seed=2), draw(2, 3, 20, seed=3, dtype=torch.bfloat16)
    raw[2:4] = float("nan")
    before = pool.clone()
    out = short_conv(raw, weight, pool, batch=ragged([2, 2, 1], [1, -1, 0], device=DEVICE))
    assert bool((out[2:4] == 0).all())
    for rows, slot in ((slice(0, 2), 1), (slice(4, 5), 0)):
        expected, carried = reference(raw[rows], weight, before[slot].float())
        assert agrees(out[rows], expected, F32_BOUND)
        assert torch.equal(pool[slot], carried.to(torch.bfloat16)), "rounded where it is stored"


def test_a_state_of_another_shape_is_refused() -> None:
    """A filter of four taps needs three carried inputs."""
    with pytest.raises(UsageError, match=r"state has shape \[1, 4, 20\], expected \[1, 3, 20\]"):
        short_conv(draw(2, 20, seed=1), draw(20, 4, seed=2), draw(1, 4, 20, seed=3),
                   batch=ragged([2], [0], device=DEVICE))  # fmt: skip

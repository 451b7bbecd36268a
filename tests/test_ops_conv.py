"""The short convolution and its carried window against a definition in plain loops."""

from collections.abc import Callable

import pytest
import torch
from tiny import relative
from torch import Tensor

from variants.ops.conv import CONV, next_state, taps, taps_fused

Conv = Callable[[Tensor, Tensor], Tensor]
SHAPES = [(1, 1, 1, 1), (2, 1, 5, 4), (1, 7, 3, 4), (3, 13, 2, 3), (2, 5, 7, 2)]  # B, T, C, W


def defined(window: Tensor, weight: Tensor) -> Tensor:
    """out[b, t, c] = sum over j of weight[c, j] * window[b, t + j, c]: j = 0 is the oldest of W inputs."""
    b, total, c = window.shape
    width = weight.shape[1]
    out = torch.zeros(b, total - width + 1, c, dtype=torch.float64)
    for i in range(b):
        for t in range(out.shape[1]):
            for ch in range(c):
                out[i, t, ch] = sum(float(weight[ch, j]) * float(window[i, t + j, ch]) for j in range(width))
    return out


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def worst(conv: Conv) -> float:
    errors = []
    for b, t, c, w in SHAPES:
        window, weight = drawn(b, t + w - 1, c, seed=t), drawn(c, w, seed=w)
        errors.append(relative(conv(window, weight), defined(window, weight)))
    return max(errors)


MUTANTS: dict[str, Conv] = {
    "taps reversed": lambda x, w: taps(x, w.flip(1)),
    "one input late": lambda x, w: taps(x.roll(1, 1), w),
    "newest tap left out": lambda x, w: taps(x, torch.cat([w[:, :-1], torch.zeros_like(w[:, :1])], 1)),
    "weights of the first channel": lambda x, w: taps(x, w[:1].expand_as(w)),
}


@pytest.mark.parametrize("name", CONV)
def test_a_convolution_is_its_definition(name: str) -> None:
    """Both implementations, to the rounding of float64, at every width and length."""
    assert worst(CONV[name]) < 1e-15


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_convolution_is_seen(mutant: str) -> None:
    """Each mutant is far from the definition."""
    assert worst(MUTANTS[mutant]) > 1e-2


TAPS = torch.tensor([[0.1, -0.3, 0.7, 0.5]], dtype=torch.float64)
Keep = Callable[[Tensor, list[int], int], Tensor]


def next_values(keep: Keep, weight: Tensor) -> list[float]:
    """One channel, inputs 1, 2, 3, ...: the value after prompts of 1 to 4 tokens, from the window they leave."""
    out = []
    for n in (1, 2, 3, 4):
        fed = torch.cat([torch.zeros(1, 3, 1), torch.arange(1.0, n + 1).view(1, n, 1)], 1).double()
        carried = keep(fed, [n], 3)
        step = torch.cat([carried, torch.full((1, 1, 1), n + 1.0, dtype=torch.float64)], 1)
        out.append(round(float(taps(step, weight)), 12))
    return out


def test_the_first_value_after_a_prompt_of_one_to_four_tokens() -> None:
    """The window that a prompt leaves gives 1.7, 2.6, 3.6, 4.6: raw inputs, oldest first, the prompt's last three."""
    assert next_values(next_state, TAPS) == [1.7, 2.6, 3.6, 4.6]


def test_wrong_windows_and_taps_have_other_values() -> None:
    """Reversed taps, a reversed window, and a window of outputs each give other values at every length."""

    def outputs(window: Tensor, lengths: list[int], keep: int) -> Tensor:
        return next_state(torch.cat([torch.zeros(1, keep, 1).double(), taps(window, TAPS)], 1), lengths, keep)

    assert next_values(next_state, TAPS.flip(1)) == [-0.1, 0.4, 1.4, 2.4]
    assert next_values(lambda w, n, k: next_state(w, n, k).flip(1), TAPS) == [1.1, 1.4, 2.4, 3.4]
    stored_outputs = next_values(outputs, TAPS)
    assert all(a != b for a, b in zip(stored_outputs, [1.7, 2.6, 3.6, 4.6], strict=True))


@pytest.mark.parametrize("lengths", [[4, 4], [4, 1], [1, 3], [2, 4]])
def test_the_window_kept_is_of_each_rows_real_inputs(lengths: list[int]) -> None:
    """Of a padded row the last three real inputs are kept, those carried in where the row brings fewer."""
    window = drawn(2, 3 + 4, 5, seed=3)
    kept = next_state(window, lengths, 3)
    for row, n in enumerate(lengths):
        real = [*window[row, :3], *window[row, 3 : 3 + n]]
        assert torch.equal(kept[row], torch.stack(real[-3:]))


@pytest.mark.parametrize("name", sorted(CONV.keys() - {"conv1d"}))  # the library chooses its order by length
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_of_a_sequence_give_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """Each output has one order of sums whatever stands beside it, and pieces shorter than the window are no case."""
    window, weight = drawn(2, 3 + 11, 5, seed=5).to(dtype), drawn(5, 4, seed=6).to(dtype)
    whole = CONV[name](window, weight)
    carried, out, start = window[:, :3], [], 3
    for n in (1, 2, 5, 1, 2):
        piece = torch.cat([carried, window[:, start : start + n]], 1)
        out.append(CONV[name](piece, weight))
        carried, start = next_state(piece, [n, n], 3), start + n
    assert torch.equal(torch.cat(out, 1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_token_summed_at_once_has_the_bits_of_tap_after_tap(dtype: torch.dtype) -> None:
    """On the host, for two channels or more: the library adds the taps in order, oldest first."""
    for b, c, w in ((1, 2, 4), (3, 5, 2), (2, 768, 4), (1, 67, 1)):
        window, weight = drawn(b, w, c, seed=c).to(dtype), drawn(c, w, seed=w).to(dtype)
        assert torch.equal(taps_fused(window, weight), taps(window, weight))

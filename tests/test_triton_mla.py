"""The latent attention kernels against the float64 reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_case import DEVICE, F32_BOUND, LONG, agrees, draw, error
from variants.errors import UsageError
from variants.ops import mla
from variants.ops.mla_triton import Softmax, absorbed, tiles

pytestmark = pytest.mark.usefixtures("poisoned")
BF16 = torch.bfloat16


def wide(*tensors: Tensor) -> Any:
    return [x.double().cpu() for x in tensors]


def check_flash(keys: int, queries: int, heads: int, sizes: tuple[int, int], tile: tuple[int, int]) -> None:
    """The last `queries` of `keys` positions; sizes (D, V); tile (tile_q, tile_k)."""
    width, v_width = sizes
    q, k = draw(1, queries, heads, width, seed=1), draw(1, keys, heads, width, seed=2)
    v = draw(1, keys, heads, v_width, seed=3)
    positions = torch.arange(keys - queries, keys, device=DEVICE).unsqueeze(0)
    options = {"scale": width**-0.5, "tile_q": tile[0], "tile_k": tile[1]}
    out = tiles(q, k, v, positions, **options)  # pyright: ignore[reportArgumentType]
    expected = mla.dense(*wide(q, k, v), positions=positions.cpu(), scale=width**-0.5)
    assert agrees(out, expected, F32_BOUND), error(out, expected)
    assert torch.equal(out, tiles(q, k, v, positions, **options))  # pyright: ignore[reportArgumentType]
    if keys > 2:
        later = mla.dense(*wide(q, k, v), positions=positions.cpu() - 1, scale=width**-0.5)
        assert not agrees(out, later, F32_BOUND), "a mask off by one must be seen"


@pytest.mark.parametrize(("keys", "queries"), [(1, 1), (31, 31), (65, 65), (64, 3), (130, 40)])
def test_flash_is_the_reference(keys: int, queries: int) -> None:
    """Prefill from nothing and behind a prefix, D (48 = 32 + 16) and V different, are within float32 rounding."""
    check_flash(keys, queries, 2, (48, 24), (32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("tile", [(64, 32), (16, 32)])
def test_flash_is_the_reference_at_model_size(length: int, tile: tuple[int, int]) -> None:
    """The same at key width 192 and value width 128."""
    check_flash(length, length, 2, (192, 128), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (64, 64)])
def test_flash_in_bf16_errs_by_its_roundings(length: int, tile: tuple[int, int]) -> None:
    """bfloat16 operands, probabilities and output at the tile sizes of real engines: the error is of their size."""
    q, k, v = (draw(1, length, 4, width, seed=s, dtype=BF16) for s, width in ((1, 192), (2, 192), (3, 128)))
    positions = torch.arange(length, device=DEVICE).unsqueeze(0)
    softmax = Softmax(probs=BF16, base2=True, out_dtype=BF16)
    out = tiles(q, k, v, positions, scale=192**-0.5, tile_q=tile[0], tile_k=tile[1], softmax=softmax)
    assert agrees(out, mla.dense(*wide(q, k, v), positions=positions.cpu(), scale=192**-0.5), 2**-8)


def test_probabilities_round_as_the_reference_does() -> None:
    """Probabilities in bfloat16: far closer to the reference that rounds them tile by tile than to the exact one."""
    q, k, v = (draw(1, 40, 1, width, seed=s) for s, width in ((1, 48), (2, 48), (3, 32)))
    positions = torch.arange(40, device=DEVICE).unsqueeze(0)
    options = {"scale": 0.2, "tile_q": 16, "tile_k": 16}
    out = tiles(q, k, v, positions, softmax=Softmax(probs=BF16), **options)  # pyright: ignore[reportArgumentType]
    at = {"mla_probs": lambda x: x.to(BF16)}
    rounded = mla.tiles(*wide(q, k, v), positions=positions.cpu(), at=at, **options)  # pyright: ignore
    exact = mla.tiles(*wide(q, k, v), positions=positions.cpu(), **options)  # pyright: ignore[reportArgumentType]
    assert error(out, exact) > 2e-4, "the rounding is there"
    assert error(out, rounded) < 0.2 * error(out, exact), "and it is the reference's rounding"


def check_absorbed(keys: int, splits: int, *, heads: int, rank: int, rope: int, page: int, whole: bool = True) -> None:
    q, q_pe = draw(1, 1, heads, rank, seed=1), draw(1, 1, heads, rope, seed=2)
    latent = draw(1, keys, rank + rope, seed=13)
    count = -(-keys // page)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(4))[:count].to(torch.int32).to(DEVICE)
    pages = torch.full((count + 2, page, rank + rope), float("nan"), device=DEVICE)
    for n, where in enumerate(table.tolist()):
        piece = latent[0, n * page : (n + 1) * page]
        pages[where, : piece.shape[0]] = piece
    positions = torch.full((1, 1), keys - 1, device=DEVICE)
    options = {"scale": 0.1, "tile_k": 16, "kv_splits": splits, "rank": rank}
    out = absorbed(q, q_pe, pages, positions, block_table=table.unsqueeze(0), whole_tiles=whole, **options)  # pyright: ignore
    expected = mla.absorbed(*wide(q, q_pe, latent), positions=positions.cpu(), **options)  # pyright: ignore
    assert agrees(out, expected, F32_BOUND), error(out, expected)
    assert torch.equal(out, absorbed(q, q_pe, latent, positions, whole_tiles=whole, **options)), "pages move no bit"  # pyright: ignore
    mutant = mla.absorbed(*wide(q, q_pe * 1.01, latent), positions=positions.cpu(), **options)  # pyright: ignore
    assert keys == 1 or not agrees(out, mutant, F32_BOUND), "k_pe must count"


@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (1, 4), (31, 1), (64, 2), (65, 3), (130, 8)])
def test_absorbed_decode_is_the_reference(keys: int, splits: int) -> None:
    """Over pages in any order and any number of splits, empty ones too, it is within float32 rounding; what lies in
    no page of the sequence, or behind its end, is never read."""
    check_absorbed(keys, splits, heads=5, rank=40, rope=8, page=16)


def test_equal_shares_are_the_same_function() -> None:
    """Runs of an equal share of the keys, not of whole tiles, as another engine cuts them."""
    check_absorbed(65, 4, heads=2, rank=24, rope=8, page=32, whole=False)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", LONG)
def test_absorbed_decode_is_the_reference_at_model_size(keys: int) -> None:
    """The same at rank 512 and rope width 64, 32 heads."""
    check_absorbed(keys, 4, heads=32, rank=512, rope=64, page=64)


def test_padding_gives_zero() -> None:
    """A query at position -1 sees nothing and gives zeros, whatever lies in the pages."""
    q, q_pe = draw(2, 1, 1, 16, seed=1), draw(2, 1, 1, 16, seed=2)
    pages = torch.full((1, 16, 32), float("nan"), device=DEVICE)
    positions = torch.full((2, 1), -1, device=DEVICE)
    table = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    out = absorbed(q, q_pe, pages, positions, scale=1.0, tile_k=16, kv_splits=2, rank=16, block_table=table)
    assert bool((out == 0).all())


def test_tiles_that_are_no_power_of_two_are_refused() -> None:
    """A tile size that the products cannot have stops in one line."""
    x = draw(1, 2, 1, 16, seed=1)
    with pytest.raises(UsageError, match="tile_k is 24, expected a power of two of 16 or more"):
        tiles(x, x, x, torch.zeros(1, 2, device=DEVICE, dtype=torch.int64), scale=1.0, tile_q=16, tile_k=24)

"""Rows together, prompts in pieces, what fills a row up: each changes no bit, or rounding alone where it must."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tiny import FORCED, FORMATS, build, casts, every_logit, forced, oracle, prompt, ragged, relative
from torch import Tensor

from variants import decode
from variants.axes import (
    Execution,
    ExecutionAxes,
    KdaAxes,
    KdaCore,
    MlaAxes,
    MlaCore,
    MoeAxes,
    Router,
    Store,
    Stream,
    Variant,
)
from variants.model import Model

F64 = oracle()
made = cache(casts)


def chunked(formats: str, *, piece: int = 0, size: int = 16, batch_invariant: bool = True) -> Variant:
    """Chunked prefill, recurrent decode, by pieces."""
    stream, gemm = FORMATS[formats]
    wide = stream is Stream.f64
    return Variant(
        stream=stream,
        gemm=gemm,
        batch_invariant=batch_invariant,
        kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=size),
        mla=MlaAxes(prefill=MlaCore.island_f64, decode=MlaCore.island_f64),
        moe=MoeAxes(router=Router.f64 if wide else Router.f32),
        logits=Store.f64 if wide else Store.f32,
        execution=ExecutionAxes(mode=Execution.incremental, prefill_piece=piece),
    )


@pytest.mark.parametrize("formats", ["f64", "f32", "bf16 stream"])
@pytest.mark.parametrize(("lengths", "size"), [((37, 51, 40), 16), ((50, 70, 90), 64), ((64, 1, 65), 5)])
def test_each_row_of_a_ragged_batch_is_its_own_run(lengths: tuple[int, ...], size: int, formats: str) -> None:
    """Rows of different lengths together give each one's bits alone, in prefill and in what is decoded after."""
    model = build(chunked(formats, size=size), made())
    together = forced(model, ragged(lengths), FORCED)
    for row, (own, continuation) in enumerate(zip(ragged(lengths), FORCED, strict=True)):
        assert torch.equal(together[row], forced(model, [own], [continuation])[0]), row


@pytest.mark.parametrize("formats", ["f64", "f32", "bf16 stream"])
@pytest.mark.parametrize("piece", [16, 64, 48])
def test_pieces_on_the_chunk_grid_give_the_bits_of_the_whole(piece: int, formats: str) -> None:
    """Prompts of 64, 128 and 130 in pieces, together in one batch: state, window and cache are carried exactly."""
    prompts = ragged([64, 128, 130])
    whole = forced(build(chunked(formats), made()), prompts, FORCED)
    assert torch.equal(forced(build(chunked(formats, piece=piece), made()), prompts, FORCED), whole)


@pytest.mark.parametrize(("batch_invariant", "piece"), [(True, 37), (False, 64), (False, 7)])
def test_other_pieces_give_the_whole_to_rounding(batch_invariant: bool, piece: int) -> None:
    """Off the grid, or with the library's own products, float64 stays within 1e-12."""
    prompts = ragged([64, 1, 130])
    whole = forced(build(chunked("f64", batch_invariant=batch_invariant), made()), prompts, FORCED)
    pieces = chunked("f64", piece=piece, batch_invariant=batch_invariant)
    assert relative(forced(build(pieces, made()), prompts, FORCED), whole) < 1e-12


def in_pieces(model: Model, tokens: list[int], size: int, between: Callable[..., object]) -> Tensor:
    """Logits after every token, prefilled in pieces, with something done to the state between two of them."""
    state, out = model.new_state(slots=1, max_len=len(tokens)), []
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        if start:
            between(state)
        out.append(
            model.forward(torch.tensor([piece]), state, slots=[0], lengths=[len(piece)], phase="prefill", every=True)[0]
        )
    return torch.cat(out)


def first_bad(a: Tensor, b: Tensor) -> int | None:
    bad = ((a - b).abs() > 1e-9).any(-1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


@pytest.mark.parametrize(("length", "bad"), [(64, None), (128, 64), (130, 64)])
@pytest.mark.parametrize("lost", ["recurrent", "conv"])
def test_a_state_lost_between_pieces_is_first_bad_where_the_second_begins(
    length: int, bad: int | None, lost: str
) -> None:
    """Pieces of 64: with recurrent state or window zeroed between them, position 64 is the first to differ."""
    model, tokens = build(F64, made()), prompt(length)

    def forget(state: object) -> None:
        store = getattr(state, lost)
        store.update({layer: torch.zeros_like(carried) for layer, carried in store.items()})

    whole = every_logit(model, tokens)
    assert first_bad(in_pieces(model, tokens, 64, lambda _: None), whole) is None
    assert first_bad(in_pieces(model, tokens, 64, forget), whole) == bad


@pytest.mark.parametrize("filler", [1, 7, 66])
def test_what_fills_a_row_up_is_never_seen(filler: int) -> None:
    """Tokens behind a row's length may be any: logits, state, window and cache are the same bits."""
    model = build(chunked("f32"), made())
    rows, lengths = ragged([12, 5]), [12, 5]

    def run(fill: int) -> tuple[Tensor, ...]:
        state = model.new_state(slots=2, max_len=14)
        tokens = torch.tensor([rows[0], [*rows[1], *[fill] * 7]])
        out = model.forward(tokens, state, slots=[0, 1], lengths=lengths, phase="prefill")
        later = decode.decode_one_token(model, state, [0, 1], torch.tensor([3, 4]))
        stores = (state.conv, state.recurrent, state.latent)
        return (out, later, *(x for store in stores for x in store.values()))

    assert all(torch.equal(a, b) for a, b in zip(run(filler), run(0), strict=True))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    """A NaN in one row's embedding makes that row NaN and leaves the others' bits."""
    clean = build(chunked("f32"), made())
    rows = [[5, 6, 7, 8, 9], [11, 12, 13], [20, 21]]

    def poison(name: str, x: Tensor) -> Tensor:
        if "embed" not in name:
            return x
        x = x.clone()
        x[12] = float("nan")
        return x

    poisoned = forced(build(chunked("f32"), made(), patch=poison), rows, FORCED)
    right = forced(clean, rows, FORCED)
    assert torch.isnan(poisoned[1]).all()
    assert torch.equal(poisoned[0], right[0])
    assert torch.equal(poisoned[2], right[2])


def test_every_token_and_last_token_logits_agree() -> None:
    """Logits of all positions hold those of each row's last real token, bit for bit where rows are alone."""
    model = build(chunked("f32"), made())
    tokens, lengths = decode.padded(ragged([9, 4]))
    last, every = (
        model.forward(
            tokens, model.new_state(slots=2, max_len=9), slots=[0, 1], lengths=lengths, phase="prefill", every=flag
        )
        for flag in (False, True)
    )
    assert torch.equal(last, torch.stack([every[0, 8], every[1, 3]]))

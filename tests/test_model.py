"""The whole forward: against an independent float64 definition, and bit for bit between its ways of being run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import plain_model
import pytest
import torch
from tiny import INCREMENTAL, ODD, RECOMPUTE, SMALL, build, casts, oracle, plain, prompt, ragged, relative
from torch import Tensor

from variants import decode
from variants.axes import (
    Execution,
    ExecutionAxes,
    Experts,
    Gemm,
    KdaAxes,
    KdaCore,
    KvCache,
    KvNormEps,
    MlaAxes,
    MlaCore,
    MoeAxes,
    NormAxes,
    Router,
    RouterScale,
    Store,
    Stream,
    Variant,
)
from variants.model import Model
from variants.weights import Patch

CONFIGS = {"odd": ODD, "small": SMALL}
made = cache(lambda name: casts(CONFIGS[name]))
FORCED = [prompt(4, seed=70 + i) for i in range(3)]


@cache
def defined(name: str, length: int) -> Tensor:
    checkpoint = made(name).checkpoint
    return plain_model.logits(checkpoint.tensors, checkpoint.config, prompt(length))


def every_logit(model: Model, tokens: Sequence[int]) -> Tensor:
    """[T, vocab] from one prefill."""
    state = model.new_state(slots=1, max_len=len(tokens))
    return model.forward(
        torch.tensor([list(tokens)]), state, slots=[0], lengths=[len(tokens)], phase="prefill", every=True
    )[0]


def forced(model: Model, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Tensor:
    """[B, T, vocab] of prefill and forced tokens through the decode path."""
    tokens = torch.tensor(continuations)
    runs = decode.steps(model, prompts, tokens.shape[1], lambda t, _: tokens[:, t])
    return torch.stack([r.logits for r in runs], 1)


def steps_of(model: Model, tokens: Sequence[int], first: int) -> Tensor:
    """[T - first + 1, vocab]: prefill of `first` tokens, then the rest one by one."""
    return forced(model, [tokens[:first]], [[*tokens[first:], 0]])[0]


def mla(core: MlaCore, **more: object) -> MlaAxes:
    decoding = MlaCore.absorbed if core is MlaCore.flash else core
    return MlaAxes(prefill=core, decode=decoding, **more)  # pyright: ignore[reportArgumentType]


F64 = oracle()
MANY = {
    "oracle": F64,
    "islands": replace(F64, kda=KdaAxes()),
    "gemv": oracle(kda=KdaCore.recurrent_gemv),
    "chunk 5": replace(F64, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=5)),
    "chunk 64 at every step": replace(F64, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.chunk)),
    "absorbed": replace(F64, mla=mla(MlaCore.absorbed)),
    "absorbed in splits": replace(F64, mla=mla(MlaCore.absorbed, tile_k=2, kv_splits=3)),
    "flash": replace(F64, mla=mla(MlaCore.flash, tile_q=3, tile_k=4)),
    "sdpa": replace(F64, mla=mla(MlaCore.sdpa)),
    "expanded cache": replace(F64, mla=replace(F64.mla, cache=KvCache.expanded)),
    "joined projections": replace(F64, fused_projections=True),
    "grouped experts": replace(F64, moe=MoeAxes(router=Router.f64, experts=Experts.grouped)),
    "scaled before": replace(F64, moe=MoeAxes(router=Router.f64, router_scale=RouterScale.before)),
    "batch-invariant": replace(F64, batch_invariant=True),
    "recompute": replace(F64, execution=RECOMPUTE),
    "pieces of 3": replace(F64, execution=ExecutionAxes(mode=Execution.incremental, prefill_piece=3)),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("variant", MANY)
def test_every_form_is_the_definition_in_float64(variant: str, config: str) -> None:
    """Cores, caches, orders and executions are one function: within 1e-12 of plain loops, by prefill and by steps."""
    model = build(MANY[variant], made(config))
    for length in (1, 17):
        if "pieces" not in variant:
            assert relative(every_logit(model, prompt(length)), defined(config, length)) < 1e-12
    assert relative(steps_of(model, prompt(17), 11), defined(config, 17)[10:]) < 1e-12


def scaled(part: str, factor: float) -> Patch:
    return lambda name, x: x * factor if part in name else x


@pytest.mark.parametrize(
    "part",
    ["A_log", "dt_bias", "conv1d", "o_norm", "f_b_proj", "g_a_proj", "b_proj", "kv_a_layernorm", "kv_b_proj",
     "experts.1.w2", "shared_experts", "gate.weight", "input_layernorm", "model.norm", "embed"],
)  # fmt: skip
def test_a_parameter_off_by_a_millionth_is_seen(part: str) -> None:
    """The comparison with the definition rejects one part in 10^6 of any parameter by a wide margin."""
    model = build(F64, made("odd"), patch=scaled(part, 1 + 1e-6))
    assert relative(every_logit(model, prompt(17)), defined("odd", 17)) > 1e-10


def test_a_patch_that_changes_nothing_changes_no_bit() -> None:
    """A patched model whose patch returns each tensor as it came gives the plain model's logits."""
    patched = build(F64, made("odd"), patch=lambda _, x: x)
    assert torch.equal(every_logit(patched, prompt(9)), every_logit(build(F64, made("odd")), prompt(9)))


def test_the_eps_of_the_latent_norm_is_an_axis() -> None:
    """With kv_eps at 1e-6 the model is the definition with that eps, and plainly not the other."""
    checkpoint = made("odd").checkpoint
    model = build(replace(F64, norm=NormAxes(kv_eps=KvNormEps.eps_1e6)), made("odd"))
    other = plain_model.logits(checkpoint.tensors, checkpoint.config, prompt(17), kv_eps=1e-6)
    assert relative(every_logit(model, prompt(17)), other) < 1e-12
    assert relative(every_logit(model, prompt(17)), defined("odd", 17)) > 1e-9


FORMATS = {
    "f64": (Stream.f64, Gemm.f64),
    "f32": (Stream.f32, Gemm.f32),
    "bf16_f32out": (Stream.f32, Gemm.bf16_f32out),
    "bf16 stream": (Stream.bf16, Gemm.bf16),
    "bf16 stream, f32 out": (Stream.bf16, Gemm.bf16_f32out),
    "bf16 in place": (Stream.bf16_in_place, Gemm.bf16_f32out),
    "f16": (Stream.f16, Gemm.f16),
}
CORES = {
    "dense": {},
    "island": {"kda": KdaCore.island_f64, "mla": MlaCore.island_f64},
    "online": {"mla": MlaCore.online_f32},
    "absorbed": {"kda": KdaCore.island_f32, "mla": MlaCore.absorbed},
}


def invariant(formats: str, cores: str, **more: object) -> Variant:
    return plain(*FORMATS[formats], batch_invariant=True, **{**CORES[cores], **more})  # pyright: ignore


@pytest.mark.parametrize(("cores", "config"), [*((cores, "odd") for cores in CORES), ("dense", "small")])
@pytest.mark.parametrize("formats", FORMATS)
def test_recompute_and_carried_state_give_the_same_bits(formats: str, cores: str, config: str) -> None:
    """With batch-invariant products and attention, in every format: prefixes run again are the state carried on."""
    prompts, forced_ids = ragged([5, 1, 9]), [c[:3] for c in FORCED]
    model = build(invariant(formats, cores), made(config))
    carried = forced(model, prompts, forced_ids)
    again = forced(build(invariant(formats, cores, execution=RECOMPUTE), made(config)), prompts, forced_ids)
    assert torch.equal(carried, again)
    alone = [
        forced(build(invariant(formats, cores), made(config)), [p], [c])
        for p, c in zip(prompts, forced_ids, strict=True)
    ]
    assert torch.equal(carried, torch.cat(alone))


@pytest.mark.parametrize("cores", CORES)
def test_without_invariance_recompute_is_carried_state_to_rounding(cores: str) -> None:
    """In float64 within 1e-12 relative, whatever order the library chose for each number of rows."""
    cores_ = {"mla": MlaCore.island_f64, **CORES[cores]}
    if cores_["mla"] is MlaCore.online_f32:
        cores_["mla"] = MlaCore.sdpa
    if cores_.get("kda") is KdaCore.island_f32:
        cores_["kda"] = KdaCore.recurrent
    carried, again = (
        forced(build(oracle(**{**cores_, "execution": e}), made("odd")), ragged([5, 1, 13]), FORCED)
        for e in (INCREMENTAL, RECOMPUTE)
    )
    assert relative(again, carried) < 1e-12


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
    model = build(chunked(formats, size=size), made("odd"))
    together = forced(model, ragged(lengths), FORCED)
    for row, (own, continuation) in enumerate(zip(ragged(lengths), FORCED, strict=True)):
        assert torch.equal(together[row], forced(model, [own], [continuation])[0]), row


@pytest.mark.parametrize("formats", ["f64", "f32", "bf16 stream"])
@pytest.mark.parametrize("piece", [16, 64, 48])
def test_pieces_on_the_chunk_grid_give_the_bits_of_the_whole(piece: int, formats: str) -> None:
    """Prompts of 64, 128 and 130 in pieces, together in one batch: state, window and cache are carried exactly."""
    prompts = ragged([64, 128, 130])
    whole = forced(build(chunked(formats), made("odd")), prompts, FORCED)
    assert torch.equal(forced(build(chunked(formats, piece=piece), made("odd")), prompts, FORCED), whole)


@pytest.mark.parametrize(("batch_invariant", "piece"), [(True, 37), (False, 64), (False, 7)])
def test_other_pieces_give_the_whole_to_rounding(batch_invariant: bool, piece: int) -> None:
    """Off the grid, or with the library's own products, float64 stays within 1e-12."""
    prompts = ragged([64, 1, 130])
    whole = forced(build(chunked("f64", batch_invariant=batch_invariant), made("odd")), prompts, FORCED)
    pieces = chunked("f64", piece=piece, batch_invariant=batch_invariant)
    assert relative(forced(build(pieces, made("odd")), prompts, FORCED), whole) < 1e-12


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
    model, tokens = build(F64, made("odd")), prompt(length)

    def forget(state: object) -> None:
        store = getattr(state, lost)
        store.update({layer: torch.zeros_like(carried) for layer, carried in store.items()})

    whole = every_logit(model, tokens)
    assert first_bad(in_pieces(model, tokens, 64, lambda _: None), whole) is None
    assert first_bad(in_pieces(model, tokens, 64, forget), whole) == bad


@pytest.mark.parametrize("filler", [1, 7, 66])
def test_what_fills_a_row_up_is_never_seen(filler: int) -> None:
    """Tokens behind a row's length may be any: logits, state, window and cache are the same bits."""
    model = build(chunked("f32"), made("odd"))
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
    clean = build(chunked("f32"), made("odd"))
    rows = [[5, 6, 7, 8, 9], [11, 12, 13], [20, 21]]

    def poison(name: str, x: Tensor) -> Tensor:
        if "embed" not in name:
            return x
        x = x.clone()
        x[12] = float("nan")
        return x

    poisoned = forced(build(chunked("f32"), made("odd"), patch=poison), rows, FORCED)
    right = forced(clean, rows, FORCED)
    assert torch.isnan(poisoned[1]).all()
    assert torch.equal(poisoned[0], right[0])
    assert torch.equal(poisoned[2], right[2])


def test_every_token_and_last_token_logits_agree() -> None:
    """Logits of all positions hold those of each row's last real token, bit for bit where rows are alone."""
    model = build(chunked("f32"), made("odd"))
    tokens, lengths = decode.padded(ragged([9, 4]))
    last, every = (
        model.forward(
            tokens, model.new_state(slots=2, max_len=9), slots=[0, 1], lengths=lengths, phase="prefill", every=flag
        )
        for flag in (False, True)
    )
    assert torch.equal(last, torch.stack([every[0, 8], every[1, 3]]))

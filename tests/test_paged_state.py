"""Slots and pages: a slot's arithmetic whatever its pages are; nothing is written that is not a live row's own."""

import hashlib
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import FORCED, FORMATS, ODD, build, casts, forced, prompt, ragged
from torch import Tensor

from variants import decode, layers
from variants.axes import (
    Execution,
    ExecutionAxes,
    KdaAxes,
    KdaCore,
    KvCache,
    MlaAxes,
    MlaCore,
    MoeAxes,
    Preempt,
    Router,
    Store,
    Stream,
    Variant,
)
from variants.batch import NOBODY, Batch
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import resolve
from variants.state import PAGED, SLOTTED, State

made = cache(casts)
KDA = {"recurrent": (KdaCore.recurrent,) * 2, "chunk": (KdaCore.chunk, KdaCore.recurrent),
       "every": (KdaCore.chunk,) * 2, "island": (KdaCore.island_f64,) * 2}  # fmt: skip
MLA = {"island": (MlaCore.island_f64,) * 2, "dense": (MlaCore.dense_f32,) * 2, "online": (MlaCore.online_f32,) * 2,
       "flash": (MlaCore.flash, MlaCore.absorbed), "absorbed": (MlaCore.absorbed,) * 2}  # fmt: skip


def variant(kda: str = "chunk", mla: str = "dense", *, formats: str = "f32", **execution: object) -> Variant:
    """Batch-invariant and paged: chunks of 16, blocks of 3 unless told."""
    stream, gemm = FORMATS[formats]
    prefill, later = KDA[kda]
    run = {"mode": Execution.paged, "batch": 4, "block_size": 3, **execution}
    wide = stream is Stream.f64
    return Variant(
        stream=stream,
        gemm=gemm,
        batch_invariant=True,
        kda=KdaAxes(prefill=prefill, decode=later, chunk_size=16 if KdaCore.chunk in KDA[kda] else 64),
        mla=MlaAxes(prefill=MLA[mla][0], decode=MLA[mla][1]),
        moe=MoeAxes(router=Router.f64 if wide else Router.f32),
        logits=Store.f64 if wide else Store.f32,
        execution=ExecutionAxes(**run),  # pyright: ignore[reportArgumentType]
    )


def incremental(v: Variant) -> Variant:
    run = v.execution
    return replace(v, execution=ExecutionAxes(mode=Execution.incremental, prefill_piece=run.prefill_piece))


@pytest.mark.parametrize(("kda", "mla"), [*((k, "dense") for k in KDA), *(("chunk", m) for m in MLA if m != "dense")])
def test_pages_change_no_bit(kda: str, mla: str) -> None:
    """Rows of different lengths over pages give the bits of each row's own incremental run, for every core."""
    prompts, v = ragged((17, 1, 20)), variant(kda, mla)
    paged = forced(build(v, made()), prompts, FORCED)
    model = build(incremental(v), made())
    for row, (own, continuation) in enumerate(zip(prompts, FORCED, strict=True)):
        assert torch.equal(paged[row], forced(model, [own], [continuation])[0]), row


@pytest.mark.parametrize(
    ("formats", "block_size"), [("f32", 1), ("f32", 7), ("f32", 16), ("f32", 64), ("f64", 7), ("bf16 stream", 7)]
)
def test_no_block_size_changes_a_bit(formats: str, block_size: int) -> None:
    """Blocks of one token, of a prime, of a chunk and longer than a sequence, also with keys and values kept."""
    prompts = ragged((17, 1))
    for cache_ in KvCache:
        v = variant(formats=formats, block_size=block_size)
        v = replace(v, mla=replace(v.mla, cache=cache_))
        plain = forced(build(incremental(v), made()), prompts, FORCED[:2])
        assert torch.equal(forced(build(v, made()), prompts, FORCED[:2]), plain), cache_


def shuffled(model: Model, *, slots: int, max_len: int) -> State:
    """A state whose slots own pages in an order that no one would choose."""
    block = model.recipe.execution.block_size
    each = -(-max_len // block)
    owned = model.new_state(slots=slots, max_len=max_len, pages=slots * each)
    order = torch.randperm(slots * each, generator=torch.Generator().manual_seed(3)).tolist()
    owned.tables = [order[s * each : (s + 1) * each] for s in range(slots)]
    return owned


def test_which_pages_a_slot_owns_changes_no_bit() -> None:
    """Pages in any order, of slots in any order, give the same logits."""
    model, rows = build(variant(), made()), ragged((17, 1, 35))

    def run(owned: State, slots: list[int]) -> list[Tensor]:
        out = [decode.prefill(model, owned, slots, rows)]
        return out + [decode.decode_one_token(model, owned, slots, torch.tensor([t, 5, t])) for t in (4, 9)]

    plain = run(model.new_state(slots=3, max_len=40), [0, 1, 2])
    mixed = run(shuffled(model, slots=5, max_len=40), [4, 0, 3])
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def hashes(owned: State) -> list[str]:
    """One hash a slot over all that it holds, then one over the rows that belong to nobody."""

    def of(slots: int, pages: list[int]) -> str:
        rows = [x[slots] for n in SLOTTED for x in getattr(owned, n).values()]
        rows += [x[pages] for n in PAGED for x in getattr(owned, n).values()]
        return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in rows)).hexdigest()

    return [of(s, owned.tables[s]) for s in range(len(owned.length))] + [of(NOBODY, [owned.pages])]


def clamped(real: type[Batch]) -> property:
    """The fault of P12: the index of "no slot" taken for slot 0."""
    return property(lambda self: (None, torch.tensor([max(s, 0) for s in self.slots])))


@pytest.mark.parametrize("fault", [False, True])
def test_p12_rows_that_fill_a_batch_up_touch_no_live_slot(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three live requests in four rows: their slots change, slot 0 and the row of nobody do not; the bits are theirs.

    With -1 clamped to 0, an idle live slot 0 changes, and slot 0 in the batch gets what another row made.
    """
    model, prompts = build(variant(), made()), ragged((7, 5, 9, 6))
    owned = shuffled(model, slots=4, max_len=20)
    decode.prefill(model, owned, [0, 1, 2, 3], prompts)
    alone = model.new_state(slots=4, max_len=20)
    decode.prefill(model, alone, [0, 1, 2, 3], prompts)
    before = hashes(owned)
    if fault:
        monkeypatch.setattr(Batch, "owned", clamped(Batch))
    tokens = torch.tensor([[5], [6], [7], [0]])
    with torch.inference_mode():
        out = model.forward(tokens, owned, slots=[3, 1, 2, NOBODY], lengths=[1, 1, 1, 0], phase="decode")
    changed = [a != b for a, b in zip(before, hashes(owned), strict=True)]
    assert changed == [fault, True, True, True, False]
    monkeypatch.undo()
    right = decode.decode_one_token(model, alone, [3, 1, 2], torch.tensor([5, 6, 7]))
    assert torch.equal(out[:3], right)
    assert owned.length == [7, 6, 10, 7]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fault", [None, "gate", "mask"])
def test_p08_filling_up_a_continued_forward_changes_nothing(batch: int, fault: str | None) -> None:
    """Tokens that are not real neither write nor decay, in a batch of one too and where a cache already holds state.

    With the gate left unmasked, or no mask at all, the next token differs.
    """
    model = build(variant("recurrent"), made())
    block = model.phases["prefill"].layers[0].attention
    assert isinstance(block, layers.KdaBlock)
    rows, more = ragged((8, 6))[:batch], ragged((5, 5))[:batch]

    def run(fill: int) -> Tensor:
        owned = model.new_state(slots=batch, max_len=30)
        slots = list(range(batch))
        decode.prefill(model, owned, slots, rows)
        tokens = torch.tensor([[*r, *[9] * fill] for r in more])
        model.forward(tokens, owned, slots=slots, lengths=[5] * batch, phase="prefill")
        return decode.decode_one_token(model, owned, slots, torch.tensor([3, 4][:batch]))

    plain = run(0)
    core = block.core

    def unmasked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor, **o: object) -> object:
        if q.shape[1] == 13:
            g = torch.cat([g[:, :5], g[:, :1].expand(-1, 8, -1, -1)], 1)
            if fault == "mask":
                k, v = (torch.cat([x[:, :5], x[:, :1].expand(-1, 8, -1, -1)], 1) for x in (k, v))
                beta = torch.cat([beta[:, :5], beta[:, :1].expand(-1, 8, -1)], 1)
        return core(q, k, v, g, beta, s, **o)

    if fault:
        block.core = unmasked
    assert torch.equal(run(8), plain) is (fault is None)


def test_a_slot_comes_back_from_the_host_bit_for_bit() -> None:
    """P27: what a slot held goes to the host and into another slot and other pages; the next step has the same bits."""
    model = build(variant("chunk", "flash", block_size=4), made())
    owned = shuffled(model, slots=3, max_len=24)
    decode.prefill(model, owned, [0, 1], ragged((13, 6)))
    saved = owned.save(0)
    assert all(x.device.type == "cpu" for x in saved.tensors.values())
    owned.load(2, saved)
    a, b = (decode.decode_one_token(model, owned, [s], torch.tensor([5])) for s in (0, 2))
    assert torch.equal(a, b)
    assert hashes(owned)[0] == hashes(owned)[2]


@pytest.mark.parametrize("lost", ["conv", "recurrent", "latent", "narrow"])
def test_p27_a_cache_that_is_wrong_shows_at_the_first_step_that_reads_it(lost: str) -> None:
    """The comparison above can fail: with one kind of store lost, or all through bf16, step 1 differs."""
    model = build(variant("chunk", "flash", block_size=4), made())
    owned = shuffled(model, slots=2, max_len=24)
    decode.prefill(model, owned, [0], ragged((13,)))
    saved = owned.save(0)
    wrong = {
        key: x.bfloat16().to(x.dtype) if lost == "narrow" else x * (key[0] != lost) for key, x in saved.tensors.items()
    }
    owned.load(1, replace(saved, tensors=wrong))
    a, b = (decode.decode_one_token(model, owned, [s], torch.tensor([5])) for s in (0, 1))
    assert not torch.equal(a, b)


def test_a_page_that_is_taken_again_is_new() -> None:
    """A page full of NaN is clean after `clear_pages`, also beside a longer row; without it the row is NaN."""
    model, right = build(variant(mla="dense"), made()), None
    for clean in (True, False):
        owned = shuffled(model, slots=2, max_len=24)
        with torch.inference_mode():
            for x in owned.latent.values():
                x[owned.tables[0]] = float("nan")
        if clean:
            owned.clear_pages(owned.tables[0])
        out = decode.prefill(model, owned, [0, 1], ragged((3, 12)))
        right = out if clean else right
        assert bool(torch.isfinite(out).all()) is clean


def test_a_row_beyond_its_pages_does_not_run() -> None:
    """Pages that do not hold a row's new tokens are an error of ours, caught before anything is written."""
    model = build(variant(), made())
    owned = model.new_state(slots=1, max_len=30, pages=10)
    owned.tables[0] = [4, 2]
    with pytest.raises(AssertionError, match="pages hold"):
        decode.prefill(model, owned, [0], [prompt(7)])
    decode.prefill(model, owned, [0], [prompt(6)])
    with pytest.raises(UsageError, match="31 tokens does not fit max_len=30"):
        owned.batch([0], [25], 25)


def test_the_two_groups_are_the_models() -> None:
    """KDA layers by slot, MLA layers by page, and the bytes of each as its shapes and dtypes give them."""
    owned = State(ODD, resolve(variant(), ODD), slots=5, max_len=12, block_size=3, pages=7)
    assert owned.groups() == {"kda": (2, 5, 2 * 4 * (3 * 75 + 3 * 7 * 11)), "mla": (1, 7, 4 * 3 * 18)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mode": Execution.incremental}, "only execution.mode=paged reads it"),
        ({"token_budget": 8, "prefill_piece": 16}, "19 here"),
        ({"token_budget": 64}, "above 0"),
        ({"prefix_cache": 2, "prefill_piece": 16}, "no multiple of 3"),
        ({"preempt": Preempt.offload}, "nothing is preempted"),
        ({"prefill_batch": 5}, "batch is 4"),
        ({"batch": 1, "fixed_rows": True}, "batch is 1"),
        ({"block_size": 0}, "at least 1"),
    ],
)
def test_a_setting_without_effect_is_refused(change: dict[str, object], why: str) -> None:
    """Each in one line that says why."""
    with pytest.raises(UsageError, match=why):
        variant(**change)  # pyright: ignore[reportArgumentType]


def test_the_recipe_says_where_bits_depend_on_the_batch() -> None:
    """Nowhere when batch-invariant; else at the library's products and softmax; off the chunk grid at the core."""
    assert resolve(variant(), ODD).as_dict()["batch_dependent"] == {}
    named = resolve(replace(variant(prefill_piece=24), batch_invariant=False), ODD).as_dict()["batch_dependent"]
    assert isinstance(named, dict)
    assert "q_proj" in named["gemm"]
    assert named["dense_f32"] == "mla_core.prefill mla_core.decode"
    assert named["pieces of 24 off the chunk grid of 16"] == "kda_core.prefill"
    assert "batch_dependent" not in resolve(incremental(variant()), ODD).as_dict()

"""Carried state by slot: a step changes the slots of its rows and nothing else; a slot that is taken again is new."""

import hashlib
from dataclasses import replace

import pytest
import torch
from tiny import ODD, build, casts, plain, prompt, ragged
from torch import Tensor

from variants import decode
from variants.axes import Gemm, KdaAxes, KdaCore, KvCache, MlaAxes, MlaCore, Store, Stream, Variant
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model import Model
from variants.recipe import resolve
from variants.state import State

F32 = plain(Stream.f32, Gemm.f32, batch_invariant=True)
EXPANDED = replace(F32, mla=replace(F32.mla, cache=KvCache.expanded))


@pytest.fixture(scope="module", params=["latent", "expanded"])
def model(request: pytest.FixtureRequest) -> Model:
    return build(F32 if request.param == "latent" else EXPANDED, casts())


def stores(state: State) -> list[Tensor]:
    kinds = (state.conv, state.recurrent, state.latent, state.keys, state.values)
    return [tensor for kind in kinds for tensor in kind.values()]


def hashes(state: State) -> list[str]:
    """One hash a slot over the bytes of all that it holds."""
    slots = range(len(state.length))
    return [hashlib.sha256(b"".join(x[s].numpy().tobytes() for x in stores(state))).hexdigest() for s in slots]


def prefilled(model: Model, slots: list[int], *, of: int, seed: int = 0, length: int = 7) -> State:
    state = model.new_state(slots=of, max_len=40)
    decode.prefill(model, state, slots, [prompt(length, seed=seed + s) for s in slots])
    return state


def test_a_step_changes_the_slots_of_its_rows_alone(model: Model) -> None:
    """Three live rows in slots 3, 0 and 2 of five: the hashes of those change, those of 1 and 4 do not, nor lengths."""
    state = prefilled(model, [0, 1, 2, 3, 4], of=5)
    before = hashes(state)
    decode.decode_one_token(model, state, [3, 0, 2], torch.tensor([5, 6, 7]))
    after = hashes(state)
    assert [a != b for a, b in zip(before, after, strict=True)] == [True, False, True, True, False]
    assert state.length == [8, 7, 8, 8, 7]


def test_a_prefill_beside_live_slots_changes_its_own_alone(model: Model) -> None:
    """A ragged prefill in slots that are not neighbours leaves the others' bytes."""
    state = prefilled(model, [0, 2], of=5)
    before = hashes(state)
    decode.prefill(model, state, [4, 1], ragged([9, 3]))
    assert [a != b for a, b in zip(before, hashes(state), strict=True)] == [False, True, False, False, True]


def test_a_row_without_a_slot_does_not_run(model: Model) -> None:
    """-1, one beyond the last, and one slot in two rows are refused before anything is written."""
    state = prefilled(model, [0, 1], of=2)
    before = hashes(state)
    for slots in ([0, -1], [0, 2], [1, 1]):
        with pytest.raises(AssertionError):
            decode.decode_one_token(model, state, slots, torch.tensor([5, 6]))
    assert hashes(state) == before
    assert state.length == [7, 7]


def test_a_row_of_no_tokens_does_not_run(model: Model) -> None:
    """A filled-up row that has no real token would have to be told from a prefill: there is none."""
    state = model.new_state(slots=2, max_len=9)
    with pytest.raises(AssertionError, match="at least one real token"):
        model.forward(torch.tensor([[5], [0]]), state, slots=[0, 1], lengths=[1, 0], phase="decode")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [4, 2, 0], [1, 2, 3]])
def test_slots_in_any_order_give_the_same_bits(model: Model, order: list[int]) -> None:
    """Which slot a row has, contiguous or not, in order or not, changes no bit of its logits."""
    rows = ragged([6, 1, 11])

    def run(slots: list[int]) -> list[Tensor]:
        state = model.new_state(slots=5, max_len=20)
        out = [decode.prefill(model, state, slots, rows)]
        out += [decode.decode_one_token(model, state, slots, torch.tensor([t, t + 1, t + 2])) for t in (4, 9)]
        return out

    assert all(torch.equal(a, b) for a, b in zip(run(order), run([0, 1, 2]), strict=True))


def test_rows_may_come_and_go(model: Model) -> None:
    """Requests that join, leave and continue at different steps each have the bits of their own run."""
    rows = {0: prompt(6, seed=1), 3: prompt(2, seed=2), 1: prompt(9, seed=3)}
    forced = {0: [5, 6, 7], 3: [8, 9, 10], 1: [11, 12, 13]}

    def alone(slot: int) -> list[Tensor]:
        state = model.new_state(slots=1, max_len=20)
        out = [decode.prefill(model, state, [0], [rows[slot]])[0]]
        return out + [decode.decode_one_token(model, state, [0], torch.tensor([t]))[0] for t in forced[slot]]

    state, got = model.new_state(slots=4, max_len=20), {slot: [] for slot in rows}
    for joins, runs in (([0], []), ([3], [0]), ([1], [3, 0]), ([], [1, 3]), ([], [0, 1, 3]), ([], [1])):
        if runs:
            tokens = torch.tensor([forced[s][len(got[s]) - 1] for s in runs])
            for s, row in zip(runs, decode.decode_one_token(model, state, runs, tokens), strict=True):
                got[s].append(row)
        for s in joins:
            got[s].append(decode.prefill(model, state, [s], [rows[s]])[0])
    for slot in rows:
        assert all(torch.equal(a, b) for a, b in zip(got[slot], alone(slot), strict=True)), slot
        assert len(got[slot]) == 4


def test_a_slot_that_is_taken_again_is_new(model: Model) -> None:
    """After reset a slot gives the bits of a fresh one, for a prompt of one token too, and the others are untouched."""
    for length in (1, 5):
        used, fresh = prefilled(model, [0, 1, 2], of=3, length=17), model.new_state(slots=1, max_len=40)
        before = hashes(used)
        used.reset([1])
        assert used.length == [17, 0, 17]
        assert [a != b for a, b in zip(before, hashes(used), strict=True)] == [False, True, False]
        again = decode.prefill(model, used, [1], [prompt(length)])
        assert torch.equal(again, decode.prefill(model, fresh, [0], [prompt(length)]))
        assert hashes(used)[1] == hashes(fresh)[0]


def test_a_slot_that_is_not_reset_is_not_new(model: Model) -> None:
    """The comparison above can fail: without a reset the second prompt goes on from the first."""
    used, fresh = prefilled(model, [0], of=1), model.new_state(slots=1, max_len=40)
    again = decode.prefill(model, used, [0], [prompt(5)])
    assert not torch.equal(again, decode.prefill(model, fresh, [0], [prompt(5)]))


def test_a_broken_sequence_leaves_nothing_behind(model: Model) -> None:
    """A slot full of NaN is clean after reset, also where it stands in a batch beside a longer row."""
    state = prefilled(model, [0, 1], of=2, length=17)
    with torch.inference_mode():
        for tensor in stores(state):
            tensor[0, : 17 if tensor.shape[1] == state.max_len else None] = float("nan")
    state.reset([0, 1])
    rows = ragged([3, 12])
    clean = model.new_state(slots=2, max_len=40)
    assert torch.equal(decode.prefill(model, state, [0, 1], rows), decode.prefill(model, clean, [0, 1], rows))


def test_a_sequence_that_does_not_fit_is_refused_before_it_is_written(model: Model) -> None:
    """The message names the length that the longest row would have; the state is as it was."""
    state = prefilled(model, [0, 1], of=2, length=39)
    before = hashes(state)
    decode.decode_one_token(model, state, [0], torch.tensor([5]))
    with pytest.raises(UsageError, match=r"41 tokens does not fit max_len=40"):
        decode.decode_one_token(model, state, [1, 0], torch.tensor([5, 6]))
    assert hashes(state)[1] == before[1]
    assert state.length == [40, 39]
    with pytest.raises(UsageError, match="at least one slot"):
        model.new_state(slots=0, max_len=4)


@pytest.mark.parametrize(
    ("variant", "recurrent", "conv", "latent"),
    [
        (F32, "f32", "f32", "f32"),
        (plain(Stream.f64, Gemm.f64, kda=KdaCore.island_f64), "f64", "f64", "f64"),
        (plain(Stream.f32, Gemm.bf16_f32out, kda=KdaCore.island_f64), "f64", "f32", "f32"),
        (plain(Stream.bf16, Gemm.bf16), "f32", "bf16", "bf16"),
        (replace(F32, kda=replace(F32.kda, outputs=Store.bf16)), "f32", "f32", "f32"),
        (replace(F32, kda=replace(F32.kda, state=Store.bf16, conv_state=Store.bf16)), "bf16", "bf16", "f32"),
        (replace(F32, mla=replace(F32.mla, kv_cache=Store.bf16)), "f32", "f32", "bf16"),
    ],
)
def test_what_is_carried_is_kept_as_it_was_computed_or_as_declared(
    variant: Variant, recurrent: str, conv: str, latent: str
) -> None:
    """A float64 core's state is float64; outputs rounded to bf16 do not narrow the state; each axis narrows its own."""
    state = State(ODD, resolve(variant, ODD), slots=1, max_len=4)
    assert {x.dtype for x in state.recurrent.values()} == {DType[recurrent].torch}
    assert {x.dtype for x in state.conv.values()} == {DType[conv].torch}
    assert {x.dtype for x in state.latent.values()} == {DType[latent].torch}


def test_shapes_are_the_models() -> None:
    """Slots, heads, K by V; slots, W - 1, all channels; slots, positions, rank and shared key."""
    state = State(ODD, resolve(EXPANDED, ODD), slots=2, max_len=9)
    assert {i: tuple(x.shape) for i, x in state.recurrent.items()} == {0: (2, 3, 7, 11), 2: (2, 3, 7, 11)}
    assert {i: tuple(x.shape) for i, x in state.conv.items()} == {0: (2, 3, 75), 2: (2, 3, 75)}
    assert {i: tuple(x.shape) for i, x in state.latent.items()} == {1: (2, 9, 18)}
    assert tuple(state.keys[1].shape) == (2, 9, 3, 12)
    assert tuple(state.values[1].shape) == (2, 9, 3, 6)


def test_cores_of_two_precisions_share_the_wider_state() -> None:
    """A float64 island prefill hands float64 to a float32 decode, which reads it rounded once."""
    mixed = Variant(
        execution=F32.execution,
        kda=KdaAxes(prefill=KdaCore.island_f64, decode=KdaCore.recurrent),
        mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.dense_f32),
    )
    state = State(ODD, resolve(mixed, ODD), slots=1, max_len=4)
    assert {x.dtype for x in state.recurrent.values()} == {torch.float64}

"""What short sequences never enter, and a prompt that does."""

from dataclasses import replace

import pytest

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.inspect import inspect_local
from harness.reach import FORCED, PAST, WIDEST, beyond, lengths_of, long_enough, of_all_lengths
from tests import tiny
from variants.axes import Execution, ExecutionAxes, KdaCore, MlaCore
from variants.ops import kda
from variants.recipe import resolve

SHORT = Battery(prompts=[tiny.prompt(5), tiny.prompt(3)], continuations=[tiny.prompt(2), tiny.prompt(2)])
PAGED = ExecutionAxes(mode=Execution.paged, block_size=8)


def chunked(**more: object):
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, kda=KdaCore.chunk, **more)  # pyright: ignore[reportArgumentType]
    return replace(variant, kda=replace(variant.kda, decode=KdaCore.recurrent, chunk_size=16))


def test_lengths_follow_from_the_recipe() -> None:
    """Chunks, tiles, runs of keys, pieces and pages each name where they begin; a recurrence names nothing."""
    plain = resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32), tiny.ODD)
    assert lengths_of(plain) == {}
    made = resolve(chunked(execution=PAGED), tiny.ODD)
    assert lengths_of(made) == {
        "chunk 2 of the delta rule": 16,
        "chunk 3 of the delta rule": 32,
        "second page": 8,
    }
    tiled = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, mla=MlaCore.absorbed)
    tiled = replace(tiled, mla=replace(tiled.mla, prefill=MlaCore.flash, tile_k=32, kv_splits=3))
    assert lengths_of(resolve(tiled, tiny.ODD)) == {"second tile of keys": 32, "3 runs of keys": 96}


def test_what_is_not_reached_is_told_until_a_prompt_is_long_enough() -> None:
    """A sequence of exactly one chunk has no second; one token more has."""
    recipe = resolve(chunked(), tiny.ODD)
    assert beyond(recipe, SHORT) == [
        "chunk 2 of the delta rule (after 16 tokens)",
        "chunk 3 of the delta rule (after 32 tokens)",
    ]
    longer = Battery(prompts=[tiny.prompt(32)], continuations=[tiny.prompt(1)])
    assert beyond(recipe, longer) == []


def test_the_longer_prompt_passes_every_length() -> None:
    """It is the battery's own tokens again and again, ends inside the last piece, and is left out where not needed."""
    recipe = resolve(chunked(), tiny.ODD)
    made = long_enough(recipe, SHORT, 512)
    assert made is not None
    assert len(made.prompts[0]) == 32 + PAST
    assert len(made.continuations[0]) == FORCED
    assert list(made.prompts[0][:7]) == [*SHORT.prompts[0], *SHORT.continuations[0]]
    assert beyond(recipe, made) == []
    assert long_enough(recipe, made, 512) is None
    assert long_enough(resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32), tiny.ODD), SHORT, 512) is None


def test_a_model_of_few_positions_bounds_it() -> None:
    """No prompt is longer than the model allows or than a verdict can afford."""
    recipe = resolve(chunked(), tiny.ODD)
    made = long_enough(recipe, SHORT, 30)
    assert made is not None
    assert len(made.prompts[0]) + FORCED <= 30
    wide = replace(chunked(), kda=replace(chunked().kda, chunk_size=1000))
    assert long_enough(resolve(wide, tiny.ODD), SHORT, 4096) is None
    assert WIDEST < 1000


@pytest.mark.parametrize("planted", [False, True])
def test_a_fault_of_the_second_chunk_is_found_on_short_prompts(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that does not decay what the one before left is clean on short prompts, and replay still names it."""
    right = kda._one_chunk

    def undecayed(q, k, v, g, beta, state, at, real, form):
        o, left = right(q, k, v, g, beta, state, at, real, form)
        return o, left + state * (1 - g.sum(-2).exp().unsqueeze(-1))

    if planted:
        monkeypatch.setattr(kda, "_one_chunk", undecayed)
    found = inspect_local(LocalEngine(tiny.casts(), chunked(), name="chunked"), SHORT)
    assert found.longer == 32 + PAST
    places = {(site, layer) for replay in found.replays.values() for site, layer, _ in replay.excess()}
    assert (places & {("kda_core", 0), ("kda_state", 0)} != set()) is planted
    assert planted or not places


def test_the_longer_prompt_fits_the_pages() -> None:
    """Where their number is named, no request may be longer than all of them: the run would be refused."""
    recipe = resolve(chunked(execution=replace(PAGED, pages=3)), tiny.ODD)
    made = long_enough(recipe, SHORT, 512)
    assert made is not None
    assert len(made.prompts[0]) == 8 + PAST
    assert long_enough(resolve(chunked(execution=replace(PAGED, pages=2)), tiny.ODD), SHORT, 512) is None


@pytest.mark.parametrize(("most", "lengths"), [(1, [2]), (2, [2, 9]), (3, [2, 5, 9]), (9, [2, 4, 5, 7, 9])])
def test_prompts_of_all_lengths(most: int, lengths: list[int]) -> None:
    """By length, whatever their order in the battery; the shortest and the longest are among them where two fit."""
    battery = Battery(prompts=tiny.ragged([5, 9, 2, 7, 4]), continuations=[tiny.prompt(2)] * 5)
    assert [len(prompt) for prompt, _ in of_all_lengths(battery, most)] == lengths

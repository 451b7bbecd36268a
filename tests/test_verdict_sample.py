"""Which places of a large battery are walked: a sample fixed beforehand and every divergence; a small one whole."""

import numpy as np
import tiny

from harness.calibration import of_recipe
from harness.envelope import envelope
from harness.forced_errors import Battery, groups
from harness.verdict_sample import PROMPTS, TOKENS, last_places, sampled, sampled_lengths
from variants.axes import Gemm, Stream
from variants.recipe import resolve


def battery(lengths: list[int]) -> Battery:
    forced = [tiny.prompt(max(n, 1), seed=n + 1)[:n] for n in lengths]
    return Battery(prompts=tiny.ragged([3 + n % 4 for n in range(len(lengths))]), continuations=forced)


def test_a_small_battery_is_walked_whole() -> None:
    """Up to as many places as the sample would have, every one belongs to it."""
    lengths = [PROMPTS * TOKENS - 10, 0, 10]
    assert sampled_lengths(battery(lengths)) == lengths


def test_a_large_battery_gives_prompts_spread_evenly_and_their_first_tokens() -> None:
    """The first and the last prompt are among them, gaps differ by one, and a short continuation is taken whole."""
    lengths = [40] * 63 + [5]
    found = sampled_lengths(battery(lengths))
    rows = np.flatnonzero(found)
    assert (len(rows), rows[0], rows[-1]) == (PROMPTS, 0, 63)
    assert set(np.diff(rows).tolist()) == {2, 3}
    assert [found[r] for r in rows] == [TOKENS] * (PROMPTS - 1) + [5]


def test_a_prompt_is_walked_as_far_as_its_last_divergence() -> None:
    """None is zero places, one at t is t + 1."""
    assert last_places(np.array([[False, False, False], [True, False, True], [True, False, False]])) == [0, 3, 1]


def test_the_sample_of_an_envelope_is_its_places_and_no_other() -> None:
    """Errors, deviations and the candidate's share of the places that belong, bit for bit those of the whole."""
    casts = tiny.casts()
    recipe = resolve(tiny.plain(Stream.bf16, Gemm.bf16), tiny.ODD)
    walked = battery([3, 0, 2])
    whole = envelope(recipe, casts, walked, members=2, seed=0, candidates={"c": of_recipe(recipe, casts)})
    part = sampled(whole, [1, 0, 2])
    assert part.table.positions.tolist() == [[0, 0], [2, 0], [2, 1]]
    kept = [whole.table.index(*place) for place in part.table.positions.tolist()]
    assert np.array_equal(part.errors, whole.errors[..., kept])
    assert np.array_equal(part.deviations, whole.deviations[:, kept], equal_nan=True)
    assert np.array_equal(part.table.parties["c"].rms, whole.table.parties["c"].rms[..., kept])
    assert part.tokens == 1


def test_prompts_that_go_on_as_long_run_together() -> None:
    """Groups are by the number of forced tokens first, then by the prompt's length."""
    prompts = tiny.ragged([9, 2, 9, 2])
    assert groups(prompts, 36) == [[1, 3], [0, 2]]
    assert groups(prompts, 36, [5, 5, 1, 1]) == [[3, 2], [1, 0]]

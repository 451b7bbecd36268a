"""Greedy choice, gaps, and the two ways through a continuation: step by step and in one pass."""

import math
from collections.abc import Sequence

import pytest
import torch
from tiny import RECOMPUTE, build, casts, oracle, prompt, ragged, relative
from torch import Tensor

from variants import decode
from variants.dtypes import DType, round_to, ulp
from variants.model import Model

NAN, INF = math.nan, math.inf


def argmax(*logits: float, dtype: torch.dtype = torch.float32) -> int:
    return int(decode.greedy(torch.tensor([logits], dtype=dtype))[0])


def test_ties_go_to_the_lowest_id() -> None:
    """0, 1, 1 is token 1, twenty times of twenty, and so at the end of a wide vocabulary and in every dtype."""
    assert [argmax(0, 1, 1) for _ in range(20)] == [1] * 20
    wide = torch.zeros(3, 40_000)
    wide[0, [12, 39_999]] = 5
    wide[1, [39_998, 39_999]] = 5
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert decode.greedy(wide.to(dtype)).tolist() == [12, 39_998, 0]


def test_a_last_maximum_and_a_random_one_are_told_apart() -> None:
    """The case separates the rules: the last maximum is 2, a draw among the tied is sometimes 2, greedy is 1."""
    row = torch.tensor([0.0, 1, 1])
    assert int((row == row.max()).nonzero()[-1]) == 2
    draws = {int(torch.multinomial((row == row.max()).double(), 1, generator=_random(i))) for i in range(20)}
    assert draws == {1, 2}


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_gap_that_rounding_closes_is_a_tie() -> None:
    """-5, 30 and the next float32: the third wins by 2e-6; in bf16 the second wins by its id, with a gap of 0."""
    above = float(torch.nextafter(torch.tensor(30.0), torch.tensor(INF)))
    logits = torch.tensor([[-5.0, 30.0, above]])
    assert decode.greedy(logits).tolist() == [2]
    assert float(decode.gaps(logits)[0]) == pytest.approx(1.9e-6, rel=0.01)
    assert float(decode.gaps(logits)[0]) == float(ulp(torch.tensor(30.0), DType.f32))
    narrow = round_to(logits, DType.bf16)
    assert decode.greedy(narrow).tolist() == [1]
    assert float(decode.gaps(narrow)[0]) == 0.0


def test_a_row_that_is_not_finite_is_named() -> None:
    """All NaN, one NaN, one infinity: each row is flagged whatever id came out, and a finite row is not."""
    rows = torch.tensor(
        [[NAN] * 6, [0, 1, 2, NAN, 4, 5], [0, 1, 2, 3, 4, INF], [0, 1, 2, 3, 4, -INF], [0, 1, 2, 3, 4, 5]]
    )
    assert decode.is_finite(rows).tolist() == [False, False, False, False, True]
    assert decode.greedy(rows)[2:].tolist() == [5, 4, 5]


def test_a_gap_is_top_one_minus_top_two_in_float64() -> None:
    """Of each row on its own; of bf16 logits the difference of the stored values, exactly."""
    rows = torch.tensor([[1.0, 4.0, 3.5], [2.0, -7.0, 2.0]], dtype=torch.bfloat16)
    assert decode.gaps(rows).tolist() == [0.5, 0.0]
    assert decode.gaps(rows).dtype == torch.float64


def test_rows_are_filled_up_at_the_right() -> None:
    """Shorter rows end in id 0 and keep their lengths."""
    tokens, lengths = decode.padded([[5, 6, 7], [8]])
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert lengths == [3, 1]


@pytest.fixture(scope="module")
def model() -> Model:
    return build(oracle(), casts())


def forced(model: Model, prompts: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
    return torch.stack([r.logits for r in decode.steps(model, prompts, tokens.shape[1], lambda t, _: tokens[:, t])], 1)


def test_steps_hand_out_one_run_a_token(model: Model) -> None:
    """`choose` sees step t and its logits; the token after the last step is asked for and not run; None ends early."""
    asked: list[int] = []

    def choose(t: int, logits: Tensor) -> Tensor | None:
        asked.append(t)
        assert logits.shape == (2, 67)
        return decode.greedy(logits) if t < 4 else None

    assert len(decode.steps(model, ragged([4, 2]), 3, choose)) == 3
    assert asked == [0, 1, 2]
    assert len(decode.steps(model, ragged([4, 2]), 9, choose)) == 5
    assert all(r.seconds > 0 for r in decode.steps(model, ragged([4, 2]), 3, choose))


def test_greedy_steps_are_the_forced_steps_of_what_they_chose(model: Model) -> None:
    """Free running and teacher forcing along its own tokens have the same logits bit for bit, recompute as well."""
    for other in (model, build(oracle(execution=RECOMPUTE), casts())):
        chosen: list[Tensor] = []

        def choose(_: int, logits: Tensor, chosen: list[Tensor] = chosen) -> Tensor:
            chosen.append(decode.greedy(logits))
            return chosen[-1]

        free = torch.stack([r.logits for r in decode.steps(other, ragged([4, 2]), 5, choose)], 1)
        assert torch.equal(forced(other, ragged([4, 2]), torch.stack(chosen, 1)), free)


def test_a_single_pass_is_the_forced_decode_in_float64(model: Model) -> None:
    """Another path, the same function: rows of different lengths, within 1e-12, each with its own positions."""
    prompts, continuations = ragged([4, 1, 9]), [prompt(5, seed=7), prompt(3, seed=8), prompt(1, seed=9)]
    single = decode.single_pass(model, prompts, continuations)
    assert [tuple(x.shape) for x in single] == [(5, 67), (3, 67), (1, 67)]
    for x, p, c in zip(single, prompts, continuations, strict=True):
        assert relative(x, forced(model, [p], torch.tensor([c]))[0]) < 1e-12


def test_a_continuation_one_token_late_is_seen(model: Model) -> None:
    """The comparison above can fail: shifted by one position the logits are far apart."""
    p, c = prompt(4), prompt(5, seed=7)
    single = decode.single_pass(model, [p], [c])[0]
    assert relative(single[1:], forced(model, [p], torch.tensor([c]))[0][:-1]) > 0.1


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_prefill_in_pieces_returns_each_rows_last_logits(model: Model, piece: int) -> None:
    """A row that ends in an earlier piece keeps the logits it ended with; slots are advanced by real tokens alone."""
    rows = ragged([7, 1, 4])
    pieces = build(oracle(), casts())
    pieces.recipe = pieces.recipe.with_execution(prefill_piece=piece)
    state, whole = pieces.new_state(slots=4, max_len=9), model.new_state(slots=4, max_len=9)
    slots = [3, 0, 1]
    got, right = decode.prefill(pieces, state, slots, rows), decode.prefill(model, whole, slots, rows)
    assert relative(got, right) < 1e-12
    assert state.length == [1, 4, 0, 7]


def test_a_prompt_of_one_token_decodes_like_any_other(model: Model) -> None:
    """One token prefilled and then steps: what one prefill over all of them gives at each position."""
    tokens = prompt(6)
    stepped = forced(model, [tokens[:1]], torch.tensor([[*tokens[1:], 0]]))[0]
    state = model.new_state(slots=1, max_len=6)
    whole = model.forward(torch.tensor([tokens]), state, slots=[0], lengths=[6], phase="prefill", every=True)[0]
    assert relative(stepped, whole) < 1e-12

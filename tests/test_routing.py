"""Expert choice as a cause: forced choices move the oracle, and only exchanges that rounding can make are excused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from harness import routing
from harness.divergence import Cause, Divergence
from harness.envelope import envelope
from harness.forced_errors import Battery
from harness.forced_values import ModelCandidate
from harness.golden import Golden
from harness.judge import ALPHA, CANDIDATE, Evidence, choices_of, divergences
from harness.routing import (
    Build,
    Choice,
    Forcing,
    Pass,
    Route,
    adopted,
    changed,
    explaining_swap,
    oracle_pass,
    rounding_gap,
)
from variants.axes import Gemm, Stream
from variants.decode import Sequences
from variants.model import Model
from variants.recipe import Recipe, Rule, resolve
from variants.rounding import NoProbe, Probe, RoundAt, Step
from variants.weights import Casts, Weights

PROMPT = tiny.prompt(9, seed=4)
BIAS = "model.layers.{}.block_sparse_moe.gate.e_score_correction_bias"
F32 = tiny.plain(Stream.f32, Gemm.f32)
TOKENS = 4


def builder(casts: Casts, **more: bool) -> Build:
    recipe = resolve(tiny.oracle(**more), casts.checkpoint.config)
    return lambda probe: Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=probe)


@cache
def odd() -> Casts:
    return tiny.casts()


def greedy(build: Build, tokens: int = TOKENS) -> list[int]:
    """The oracle's own continuation of the prompt."""
    out: list[int] = []
    for _ in range(tokens):
        out.append(int(oracle_pass(build, PROMPT, [*out, 0]).logits[-1].argmax()))
    return out


@cache
def base() -> tuple[list[int], Pass]:
    tokens = greedy(builder(odd()))
    return tokens, oracle_pass(builder(odd()), PROMPT, tokens)


def swap(choice: Choice) -> dict[Route, tuple[int, ...]]:
    return {(choice.layer, choice.position): choice.swapped}


def some_choice() -> Choice:
    return base()[1].choices[(2, 5)]


def test_a_choice_is_the_best_experts_and_the_gap_to_the_next() -> None:
    """At every place with a router the chosen are the best scores in order, the runner-up the next, the gap between."""
    choices = base()[1].choices
    assert set(choices) == {(layer, p) for layer in (1, 2) for p in range(len(PROMPT) + TOKENS - 1)}
    for c in choices.values():
        order = c.scores.argsort(descending=True).tolist()
        assert [*c.chosen, c.runner_up] == order[:3]
        assert c.gap == float(c.scores[order[1]] - c.scores[order[2]]) == c.gap_to(c.swapped) > 0


def test_the_gap_to_another_choice_is_of_what_was_exchanged() -> None:
    """Order makes no gap; a far expert in place of a near one makes a wider one."""
    c = some_choice()
    last = int(c.scores.argmin())
    assert c.gap_to(c.chosen[::-1]) == 0.0
    assert c.gap_to((c.chosen[0], last)) == float(c.scores[c.chosen[1]] - c.scores[last]) > c.gap
    assert c.gap_to((c.runner_up, last)) == float(c.scores[c.chosen[0]] - c.scores[last])


def test_forcing_its_own_choice_changes_no_bit() -> None:
    """The oracle with its own experts forced everywhere is the oracle."""
    tokens, right = base()
    own = {r: c.chosen for r, c in right.choices.items()}
    again = oracle_pass(builder(odd()), PROMPT, tokens, ids=own)
    assert torch.equal(again.logits, right.logits)


def test_forcing_a_choice_moves_the_margin_from_there_on() -> None:
    """With another expert at position 10 logits before it stay bit for bit, those at it and after it move.

    In a batch-invariant oracle: an expert that has a row more or less sums its other rows in another order elsewhere.
    """
    tokens, build = base()[0], builder(odd(), batch_invariant=True)
    right = oracle_pass(build, PROMPT, tokens)
    c = right.choices[(1, 10)]
    moved = oracle_pass(build, PROMPT, tokens, ids=swap(c)).logits
    first = 10 - (len(PROMPT) - 1)
    assert torch.equal(moved[:first], right.logits[:first])
    assert all(not torch.equal(a, b) for a, b in zip(moved[first:], right.logits[first:], strict=True))
    usual = oracle_pass(builder(odd()), PROMPT, tokens, ids=swap(c)).logits
    assert tiny.relative(usual, moved) < 1e-13


def test_sets_are_compared_not_orders() -> None:
    """A place counts as changed where its set of experts differs; the order in which they stand does not matter."""
    right = base()[1].choices
    ids: dict[Route, Sequence[int]] = {r: c.chosen[::-1] for r, c in right.items()}
    assert changed(right, ids) == []
    ids |= {(2, 3): right[(2, 3)].swapped, (1, 3): right[(1, 3)].swapped, (2, 1): right[(2, 1)].swapped}
    assert changed(right, ids) == [(2, 1), (1, 3), (2, 3)]


def test_rounding_bridges_a_gap_of_its_own_size() -> None:
    """bf16 exchanges experts over hundredths of a score, f32 over millionths, f64 over next to nothing."""

    def gap(stream: Stream, gemm: Gemm) -> float:
        return rounding_gap(resolve(tiny.plain(stream, gemm), tiny.ODD))

    assert gap(Stream.bf16, Gemm.bf16) == pytest.approx(0.05)
    assert gap(Stream.f32, Gemm.bf16_f32out) == pytest.approx(0.05)
    assert 1e-6 < gap(Stream.f32, Gemm.f32) < 1e-5
    assert rounding_gap(resolve(tiny.oracle(), tiny.ODD)) < 1e-13


def test_what_one_exchange_drags_along_is_adopted_with_it() -> None:
    """A run that exchanged experts once is reproduced bit for bit, with every later choice that followed from it."""
    tokens, right = base()
    build = builder(odd())
    dragging = None
    for c in right.choices.values():
        other = oracle_pass(build, PROMPT, tokens, ids=swap(c))
        ids = {r: x.chosen for r, x in other.choices.items()} | swap(c)
        if len(changed(right.choices, ids)) > 1:
            dragging = c, other, ids
            break
    assert dragging is not None, "no exchange of this model changes a later choice; take another seed"
    c, other, ids = dragging
    found = adopted(build, PROMPT, tokens, ids, within=c.gap * (1 + 1e-9))
    assert (c.layer, c.position) in found.taken
    assert not found.wide
    assert torch.equal(found.run.logits, other.logits)


def test_an_exchange_over_a_wide_gap_is_not_adopted() -> None:
    """It stays out of the oracle's run and is named as too far off."""
    tokens, right = base()
    c = some_choice()
    ids = {r: x.chosen for r, x in right.choices.items()} | swap(c)
    found = adopted(builder(odd()), PROMPT, tokens, ids, within=c.gap / 2)
    assert not found.taken
    assert list(found.wide) == [(c.layer, c.position)]
    assert torch.equal(found.run.logits, right.logits)


def test_the_exchange_that_explains_a_margin_is_found() -> None:
    """Of all narrow places the one whose exchange gives the observed margin is named; without it nothing is."""
    tokens, right = base()
    build, c = builder(odd()), some_choice()
    pair = (tokens[-1], tokens[-2])
    logits = oracle_pass(build, PROMPT, tokens, ids=swap(c)).logits[-1]
    margin = float(logits[pair[0]] - logits[pair[1]])

    def search(within: float) -> object:
        return explaining_swap(build, PROMPT, tokens, pair=pair, wanted=lambda m: abs(m - margin) < 1e-9, within=within)

    narrow = sorted(x.gap for x in right.choices.values()).index(c.gap)
    found = search(c.gap)
    assert narrow < 24
    assert found is not None
    assert found.choice == c  # pyright: ignore[reportAttributeAccessIssue]
    assert search(c.gap / 2) is None


def test_late_exchanges_are_tried_though_many_are_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt has more narrow choices than are tried; one at the last positions is tried all the same."""
    tokens, right = base()
    build, end = builder(odd()), len(PROMPT) + len(tokens) - 1
    c = max((x for x in right.choices.values() if x.position == end - 1), key=lambda x: x.gap)
    pair = (tokens[-1], tokens[-2])
    logits = oracle_pass(build, PROMPT, tokens, ids=swap(c)).logits[-1]
    margin = float(logits[pair[0]] - logits[pair[1]])
    monkeypatch.setattr(routing, "MOST_SWAPS", 0)

    def search(late: int) -> object:
        def wanted(m: float) -> bool:
            return abs(m - margin) < 1e-9

        return explaining_swap(build, PROMPT, tokens, pair=pair, wanted=wanted, within=c.gap, late=late)

    found = search(1)
    assert found is not None
    assert found.choice == c  # pyright: ignore[reportAttributeAccessIssue]
    assert search(0) is None


# --- what a judge makes of it (P18) ---


@dataclass(frozen=True)
class Routed:
    """A run whose experts were exchanged at one place so that its last token is another than the golden's."""

    casts: Casts
    choice: Choice
    tokens: list[int]

    def candidate(self, inner: Probe) -> Model:
        recipe = declared(self.casts)
        probe = _Forced(Forcing(swap(self.choice)), inner)
        return Model(tiny.ODD, recipe, Weights(self.casts, recipe.semantics), probe=probe)


class _Forced:
    """A forcing of one row, seen by a watcher."""

    def __init__(self, forcing: Forcing, watcher: Probe) -> None:
        self.forcing, self.watcher = forcing, watcher

    def begin(self, step: Step) -> None:
        self.forcing.begin(step)
        self.watcher.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return self.watcher.bind(site, layer, rule, self.forcing.bind(site, layer, rule, rounding))


def declared(casts: Casts) -> Recipe:
    return resolve(F32, casts.checkpoint.config)


@cache
def flipping() -> tuple[Choice, list[int]]:
    """An exchange, at a gap far beyond float32's rounding, after which the oracle prefers another token."""
    build = builder(odd())
    tokens, right = base()
    for c in right.choices.values():
        moved = oracle_pass(build, PROMPT, tokens, ids=swap(c)).logits
        if c.gap > 1e-3 and not torch.equal(moved.argmax(-1), right.logits.argmax(-1)):
            return c, tokens
    raise AssertionError("no exchange of this model flips a token; take another seed")


def narrowed(casts: Casts, choice: Choice, gap: float) -> Casts:
    """The same weights with the runner-up's bias raised until only `gap` is left between it and the last chosen."""
    name = BIAS.format(choice.layer)
    bias = casts.checkpoint.tensors[name].clone()
    bias[choice.runner_up] += choice.gap - gap
    return Casts(replace(casts.checkpoint, tensors={**casts.checkpoint.tensors, name: bias}))


@cache
def flipping_within_rounding() -> tuple[Choice, Routed]:
    """As `flipping`, with the weights moved so that the gap is about 1e-6."""
    for c in base()[1].choices.values():
        casts = narrowed(odd(), c, 1e-6)
        build = builder(casts)
        tokens = greedy(build)
        right = oracle_pass(build, PROMPT, tokens)
        now = right.choices[(c.layer, c.position)]
        moved = oracle_pass(build, PROMPT, tokens, ids=swap(now)).logits
        if now.gap < 2e-6 and not torch.equal(moved.argmax(-1), right.logits.argmax(-1)):
            return now, Routed(casts, now, tokens)
    raise AssertionError("no exchange of these models flips a token; take another seed")


def judged(routed: Routed, *, split: float = 0.0) -> list[Divergence]:
    """The judge on a golden that the oracle itself would have written, where its token is not the candidate's.

    split: nats by which a member's own exchange of experts moved the watched tokens where the candidate diverges.
    """
    build, recipe = builder(routed.casts), declared(routed.casts)
    golden = Golden(name="own", prompts=(tuple(PROMPT),), tokens=np.array([[routed.tokens]], np.int32))
    chosen = _chosen(routed)
    watched = Battery(prompts=[PROMPT], continuations=[routed.tokens], watch=np.stack([golden.tokens[0], chosen], -1))
    candidate = ModelCandidate(routed.candidate)
    own = envelope(recipe, routed.casts, watched, members=6, candidates={CANDIDATE: candidate})
    if split:
        at = (chosen != golden.tokens[0]).ravel()
        own.deviations[0, at] += split * np.arange(own.deviations.shape[-1])
    evidence = Evidence(
        golden=golden, chosen=chosen, own=own, reference=own, declared=recipe, golden_recipe=recipe, oracle=build,
        truth=build, make_row=lambda n, tap: Sequences(routed.candidate(tap), [PROMPT], TOKENS),
    )  # fmt: skip
    return divergences(evidence)


def _chosen(routed: Routed) -> np.ndarray:
    seen: list[Tensor] = []
    run = Sequences(routed.candidate(NoProbe()), [PROMPT], TOKENS)
    seen.append(run.start())
    seen += [run.after(torch.tensor([t])) for t in routed.tokens[:-1]]
    return torch.stack([x.argmax(-1) for x in seen], 1).numpy()


def test_experts_exchanged_within_rounding_are_rounding_amplified() -> None:
    """P18: at a gap that float32 bridges, the token is explained: layer, position, experts and gap are named."""
    choice, routed = flipping_within_rounding()
    found = judged(routed)
    assert found
    assert {d.cause for d in found} == {Cause.routing}
    out, into = choice.chosen[-1], choice.runner_up
    evidence = found[0].evidence
    assert (evidence["layer"], evidence["position"]) == (choice.layer, choice.position)
    assert evidence["experts"] == f"[{out}] -> [{into}]"
    assert evidence["gap"] == float(f"{choice.gap:.3g}") < 2e-6
    assert evidence["side"] == "candidate"
    assert "rounding amplified by routing (layer" in found[0].reason


def test_a_sigma_that_is_wide_by_a_members_own_exchange_does_not_hide_the_candidates() -> None:
    """Within such a sigma the far token is rounding; that it came by routing is told, and only where it did."""
    choice, routed = flipping_within_rounding()
    within = judged(routed, split=30.0)
    assert within
    assert all(d.p > ALPHA and d.cause is Cause.routing for d in within)
    assert within[0].evidence["experts"] == f"[{choice.chosen[-1]}] -> [{choice.runner_up}]"
    choice, tokens = flipping()
    apart = judged(Routed(odd(), choice, tokens), split=30.0)
    assert {d.cause for d in apart} == {Cause.rounding}


def test_the_same_exchange_over_a_wide_gap_is_a_defect() -> None:
    """P18: where float32 cannot have made it, it is a defect, and the gap is named as what speaks against rounding."""
    choice, tokens = flipping()
    found = judged(Routed(odd(), choice, tokens))
    assert found
    assert {d.cause for d in found} == {Cause.defect}
    assert found[0].evidence["gap is"] == "not rounding"
    assert found[0].evidence["gap"] == float(f"{choice.gap:.3g}")


def test_the_margin_is_told_in_units_of_the_candidates_logits() -> None:
    """Each divergence carries its margin in ULP of the declared logits, here float32."""
    choice, tokens = flipping()
    first = judged(Routed(odd(), choice, tokens))[0]
    logits = base()[1].logits[first.position]
    larger = float(logits[[first.golden_token, first.token]].abs().max())
    unit = 2.0 ** (np.floor(np.log2(larger)) - 23)
    assert first.logits_format == "f32"
    assert first.ulps == pytest.approx(abs(first.margin) / unit, rel=1e-6)


def test_choices_of_a_run_are_read_at_every_position() -> None:
    """Prompt and forced tokens, every layer with a router, as the run chose them."""
    tokens, right = base()
    build = builder(odd())
    ids = choices_of(lambda tap: Sequences(build(tap), [PROMPT], TOKENS), tokens)
    assert ids.keys() == right.choices.keys()
    assert changed(right.choices, ids) == []

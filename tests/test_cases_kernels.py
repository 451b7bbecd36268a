"""Cases from practice about kernels (P01 to P20) at their own sizes: which operation is named, and on what input.

What the operations themselves give is in tests/test_ops_*.py; here a fault is planted in a small model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.inspect import make_oracle, model_stepper
from harness.local_replay import LocalReplay, local_replay
from harness.lockstep import walk
from harness.power_watch import first_difference
from harness.probes import Tap
from harness.routing import adopted, oracle_pass
from harness.verdict import Finding, RunClass, Verdict, conclude, replay_findings
from variants import decode
from variants.axes import Gemm, KdaAxes, KdaCore, MlaAxes, MlaCore, Stream, Variant
from variants.defects import DEFECTS, Planted, Spread, build, plant
from variants.defects_kinds import Severity
from variants.layers import KdaBlock
from variants.model import Model
from variants.model_config import ModelConfig
from variants.ops import kda, mla
from variants.recipe import Rule
from variants.rounding import Probe, RoundAt, Step
from variants.weights import Casts

HEAVY, MEDIUM = Severity.heavy, Severity.medium
SQUARE = replace(tiny.ODD, kda_head_dim=8, kda_v_head_dim=8)  # K = V: no shape tells a transposed state
ROUTER = "model.layers.1.block_sparse_moe.gate"
SHORT = Battery(prompts=tiny.ragged([9, 5]), continuations=[tiny.prompt(4, seed=70 + i) for i in range(2)])


def carrier(*, chunk: int = 4, piece: int = 0) -> Variant:
    """float32 everywhere, chunked prefill, recurrent decode."""
    return Variant(
        stream=Stream.f32,
        gemm=Gemm.f32,
        kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=chunk),
        mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.dense_f32),
        execution=replace(tiny.INCREMENTAL, prefill_piece=piece),
    )


def edited(edit: Callable[[str, Tensor], Tensor] = lambda _, x: x, config: ModelConfig = tiny.ODD) -> Casts:
    """Random weights, each passed through `edit`."""
    made = tiny.casts(config).checkpoint
    return Casts(replace(made, tensors={name: edit(name, x.clone()) for name, x in made.tensors.items()}))


def long(tokens: int) -> Battery:
    return Battery(prompts=[tiny.prompt(tokens)], continuations=[[5]])


@dataclass(frozen=True)
class Ran:
    """A model with a fault in it, run over forced tokens and held against what it should compute."""

    engine: LocalEngine
    over: Battery
    make: Callable[[Tap], Model]

    @property
    def replay(self) -> LocalReplay:
        recipe = self.engine.recipe
        oracle = make_oracle(self.engine.casts, recipe)
        step = lambda tap: model_stepper(self.make(tap), self.over)  # noqa: E731
        return local_replay(step, oracle, recipe, self.over.prompts, self.over.continuations)

    @property
    def findings(self) -> list[Finding]:
        config = self.engine.casts.checkpoint.config
        return replay_findings(self.replay, recipe=self.engine.recipe, config=config, rung="as run")

    @property
    def verdict(self) -> Verdict:
        config = self.engine.casts.checkpoint.config
        return conclude(self.findings, [], invalid=None, bar_met=True, config=config, inspected=True)


def ran(
    name: str | None,
    over: Battery = SHORT,
    *,
    variant: Variant | None = None,
    casts: Casts | None = None,
    severity: Severity = HEAVY,
    layers: Spread | Sequence[int] = Spread.all,
) -> Ran:
    """Over a small model with a defect of `variants.defects`, or none."""
    engine = LocalEngine(casts or edited(), variant or carrier(), name="tiny")
    if name is None:
        return Ran(engine, over, lambda tap: engine.build(probe=tap))
    p: Planted = plant(DEFECTS[name], severity=severity, layers=layers, config=engine.casts.checkpoint.config)
    return Ran(engine, over, lambda tap: build(engine, engine.recipe, p, probe=tap))


def where(verdict: Verdict) -> tuple[RunClass, str | None, int | None]:
    return verdict.run_class, verdict.site, verdict.layer


# --- P01, P02, P11: what is handed over ---


def test_p01_a_transposed_hand_off_is_named_at_the_second_chunk() -> None:
    """K = V = 8, chunks of 32: one chunk has no finding, two have the defect at the core, first bad position 32."""
    casts, variant = edited(config=SQUARE), carrier(chunk=32)
    assert ran("chunk_state_transposed", long(32), casts=casts, variant=variant).verdict.run_class is RunClass.passed
    found = ran("chunk_state_transposed", long(64), casts=casts, variant=variant).verdict
    assert where(found) == (RunClass.defect, "kda_core", 0)
    assert "first bad position 32: the edge of a 32-token chunk, so the state's hand-off" in found.reason


@pytest.mark.parametrize("seed", range(5))
def test_p01_the_next_token_is_off_by_as_much_as_the_largest_value(seed: int) -> None:
    """Read from the transposed state, one further token is off by half to three times its largest value."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 1, 8, generator=random, dtype=torch.float64) for _ in range(3))
    state = torch.randn(1, 1, 8, 8, generator=random, dtype=torch.float64)
    rest = kda.l2norm(q), kda.l2norm(k), v, torch.full_like(q, -0.05), torch.full((1, 1, 1), 0.5, dtype=q.dtype)
    right, wrong = (kda.recurrent(*rest, s)[0] for s in (state, state.transpose(-1, -2)))
    assert 0.5 < tiny.relative(wrong, right) < 3


def test_p02_a_state_that_the_second_piece_forgets_is_named_at_position_64() -> None:
    """130 tokens in pieces of 64: 64 alone have no finding; with the state forgotten the first bad position is 64."""
    variant = carrier(chunk=16, piece=64)
    assert ran(None, long(130), variant=variant).verdict.run_class is RunClass.passed
    assert not ran("state_reset", long(64), variant=variant).findings
    found = ran("state_reset", long(130), variant=variant).verdict
    assert where(found) == (RunClass.defect, "kda_core", 0)
    assert "first bad position 64, a multiple of the prefill piece 64" in found.reason


@pytest.mark.parametrize("lengths", [(500, 700, 900), (256, 256, 256)])
def test_p11_each_state_of_a_ragged_batch_is_that_of_a_run_cut_at_its_length(lengths: tuple[int, ...]) -> None:
    """In chunks and pieces of 128 every request's slot holds the bits of its solo run, and no other's does."""
    config = replace(tiny.ODD, max_length=1024, layer_kinds=tiny.ODD.layer_kinds[:1], moe_layers=(False,))
    variant = replace(carrier(chunk=128, piece=128), batch_invariant=True)
    model = LocalEngine(edited(config=config), variant, name="tiny").build()

    def carried(prompts: list[list[int]]) -> list[Tensor]:
        state = model.new_state(slots=len(prompts), max_len=max(lengths))
        decode.prefill(model, state, list(range(len(prompts))), prompts)
        return [x for store in (state.recurrent, state.conv) for x in store.values()]

    rows = tiny.ragged(lengths)
    together = carried(rows)
    for request, row in enumerate(rows):
        solo, other = carried([row]), (request + 1) % len(rows)
        assert [torch.equal(x[request], y[0]) for x, y in zip(together, solo, strict=True)] == [True] * 2, request
        assert [torch.equal(x[other], y[0]) for x, y in zip(together, solo, strict=True)] == [False] * 2, request


# --- P03: the exponent's span ---


def decaying(log_decay: float, *, first: float | None = None) -> Casts:
    """A model whose channels have this log-decay at every token, each head's first channel another one."""

    def edit(name: str, x: Tensor) -> Tensor:
        if name.endswith(("f_b_proj.weight", ".A_log")):
            return torch.zeros_like(x)
        if not name.endswith(".dt_bias"):
            return x
        rates = torch.full_like(x, -log_decay)
        rates[:: tiny.ODD.kda_head_dim] = -(log_decay if first is None else first)
        return rates.expm1().log()

    return edited(edit)


def one_anchor(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **_: Any) -> Any:
    """A chunk with all decays taken from its start and exponents held at 88, as float32 can."""
    total = g.cumsum(1).transpose(1, 2)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    back, beta = (-total).clamp_max(88).exp(), beta.transpose(1, 2).unsqueeze(-1)
    inverse = kda.unit_lower_inverse(((k * beta * total.exp()) @ (k * back).transpose(2, 3)).tril(-1))
    new = inverse @ (v * beta)
    return (((q * total.exp()) @ (k * back).transpose(2, 3)).tril() @ new).transpose(1, 2), state


@pytest.mark.parametrize(("log_decay", "wrong"), [(-1.0, False), (-3.0, True)])
def test_p03_wrong_but_finite_is_flagged(log_decay: float, wrong: bool) -> None:
    """A chunk of 64 from one anchor holds at -1; at -3 nothing is non-finite and the core is named as a defect."""
    run = ran(None, long(64), casts=decaying(log_decay), variant=carrier(chunk=64))
    assert not run.findings

    def make(tap: Tap) -> Model:
        model = run.engine.build(probe=tap)
        block = model.phases["prefill"].layers[0].attention
        assert isinstance(block, KdaBlock)
        block.core = one_anchor
        return model

    errors = replace(run, make=make).replay.errors
    error = errors[("kda_core", 0, "prefill")]
    assert error.non_finite == 0
    assert error.in_excess is wrong
    assert (error.relative > 1e-3) is wrong


# --- the operation that is named (P04, P05, P06, P07, P10, P15, P16, P20) ---


@pytest.mark.parametrize(
    ("name", "severity", "layers", "site"),
    [
        ("gate_bias_per_head", HEAVY, (0,), "decay_gate"),  # P04
        ("gate_bounded", HEAVY, (0,), "decay_gate"),  # P05
        ("rounded_decay", MEDIUM, (2,), "kda_core"),  # P07
        ("conv_state_activated", HEAVY, (0,), "conv_state"),  # P10
        ("conv_taps_reversed", HEAVY, (2,), "conv_sum"),  # P10
        ("router_bias_leaks", HEAVY, (2,), "router_weights"),  # P16
        ("state_decay_after_error", HEAVY, (0,), "kda_core"),  # P20
    ],
)
def test_a_fault_is_a_defect_of_its_operation_and_layer(
    name: str, severity: Severity, layers: tuple[int, ...], site: str
) -> None:
    """The verdict names the operation itself, before any attention output that follows from it."""
    assert where(ran(name, severity=severity, layers=layers).verdict) == (RunClass.defect, site, layers[0])


def test_a_model_without_a_fault_has_no_finding() -> None:
    """What the faults above are told from."""
    assert ran(None).verdict.run_class is RunClass.passed


def constant_bias(name: str, x: Tensor) -> Tensor:
    return torch.full_like(x, -3.0) if name.endswith(".dt_bias") else x


def no_bias(name: str, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if name.endswith("e_score_correction_bias") else x


def no_decay(name: str, x: Tensor) -> Tensor:
    return torch.full_like(x, -200.0) if name.endswith(".dt_bias") else x


ONE_TOKEN = Battery(prompts=[[5]], continuations=[[7]])


@pytest.mark.parametrize(
    ("name", "casts", "over"),
    [
        ("gate_bias_per_head", edited(constant_bias), SHORT),  # P04: rows of the bias that are constant
        ("mla_scaled", edited(), ONE_TOKEN),  # P13: one key
        ("router_bias_leaks", edited(no_bias), SHORT),  # P16: zero bias
    ],
    ids=["P04", "P13", "P16"],
)
def test_an_input_that_cannot_show_a_fault_is_no_coverage(name: str, casts: Casts, over: Battery) -> None:
    """Every value is that of the right code, which the power experiment calls not exercised; elsewhere one differs."""
    run = ran(name, over, casts=casts)
    assert differs(run, ran(None, over, casts=casts)) is None
    assert not run.findings
    assert differs(ran(name), ran(None)) is not None


@pytest.mark.parametrize(("casts", "over"), [(edited(no_decay), SHORT), (edited(), ONE_TOKEN)])
def test_p20_the_order_of_decay_and_error_needs_gates_and_two_tokens(casts: Casts, over: Battery) -> None:
    """With gates of zero, or one token from a zero state, the other order is right; with both it is a defect."""
    assert ran("state_decay_after_error", over, casts=casts).verdict.run_class is RunClass.passed
    assert where(ran("state_decay_after_error").verdict) == (RunClass.defect, "kda_core", 0)


def differs(a: Ran, b: Ran) -> object:
    """The first place of two runs whose values differ."""
    seen: list[list[Any]] = [[], []]
    taps = Tap(), Tap()
    models = [run.make(tap) for run, tap in zip((a, b), taps, strict=True)]
    for _ in walk(models, a.over.prompts, a.over.continuations):
        for digests, tap in zip(seen, taps, strict=True):
            bits = {place: value.contiguous().view(torch.uint8) for place, value in tap.values.items()}
            digests += [(place, value.numpy().tobytes()) for place, value in bits.items()]
    return first_difference(seen[0], seen[1])


def test_p05_two_forms_that_share_a_fault_agree_and_do_not_pass() -> None:
    """With the bounded gate in every layer chunks and steps agree to rounding, and each is a defect of its gate."""
    runs = [ran("gate_bounded", variant=v) for v in (carrier(), tiny.plain(Stream.f32, Gemm.f32))]
    chunked, stepped = (tiny.forced(r.make(Tap()), r.over.prompts, r.over.continuations) for r in runs)
    assert tiny.relative(chunked, stepped) < 1e-3
    sound = ran(None)
    assert tiny.relative(chunked, tiny.forced(sound.make(Tap()), SHORT.prompts, SHORT.continuations)) > 1e-2
    assert [where(r.verdict) for r in runs] == [(RunClass.defect, "decay_gate", 0)] * 2


def near(name: str, x: Tensor) -> Tensor:
    """P15's biases, and scores that lie as near to each other as its own do."""
    if name == f"{ROUTER}.weight":
        return x * 0.01
    return torch.tensor([7.012, 7.010, 6.990, 6.9, 6.5]) if name == f"{ROUTER}.e_score_correction_bias" else x


def test_p15_a_bias_stored_in_bf16_is_named_at_the_experts_of_its_layer() -> None:
    """7.012, 7.010 and 6.990 are all 7.0 in bf16: the sets of layer 1 are no longer those of the scores."""
    run = ran("rounded_correction_bias", casts=edited(near), severity=MEDIUM, layers=(1,))
    assert where(run.verdict) == (RunClass.defect, "router_ids", 1)
    assert run.replay.errors[("router_ids", 1, "prefill")].changed > 5


def keys(scale: float) -> Casts:
    """A model whose keys before their norm are of about this size."""
    return edited(lambda name, x: x * scale if name.endswith("k_proj.weight") else x)


@pytest.mark.parametrize("name", ["l2_clamped", "l2_eps_on_mean"])
def test_p06_another_l2_norm_is_a_defect_once_a_tiny_key_is_asked(name: str) -> None:
    """Keys a thousand times as large hide it under float32's rounding; keys a thousandth as large make it a defect."""
    assert ran(name, casts=keys(1e4)).verdict.run_class is RunClass.passed
    assert where(ran(name, casts=keys(1e-3)).verdict) == (RunClass.defect, "k_l2norm", 0)


def test_p07_a_decay_narrowed_to_bf16_is_named_within_nine_tokens() -> None:
    """At 0.9981 a token, of which nine leave 98 %, the core is named; where bf16 holds the decay there is nothing."""
    nine = Battery(prompts=[tiny.prompt(4)], continuations=[tiny.prompt(6)])

    def verdict(decay: float) -> Verdict:
        casts = decaying(math.log(decay), first=math.log(0.25))
        return ran("rounded_decay", nine, casts=casts, severity=MEDIUM, layers=(0,)).verdict

    assert where(verdict(0.9981)) == (RunClass.defect, "kda_core", 0)
    assert verdict(0.5).run_class is RunClass.passed


# --- P08: what a pad does by how much ---


@pytest.mark.parametrize(
    ("masked", "least", "most"), [("kvbg", 0, 0), ("bg", 0, 0), ("v", 0.25, 0.45), ("kvb", 0.03, 0.12)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_p08_an_interior_pad_moves_later_tokens_by_its_share(
    masked: str, least: float, most: float, batch: int
) -> None:
    """24 tokens, pads at 8 to 15, slow gates: 0 with beta and gate masked, a third by v alone, 3 to 12 % but g."""
    random = torch.Generator().manual_seed(0)
    shape, pad = (batch, 24, 16, 8), torch.zeros(24, dtype=torch.bool)
    pad[8:16] = True
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    g = -0.04 * torch.rand(shape, generator=random, dtype=torch.float64)
    beta = torch.rand(shape[:3], generator=random, dtype=torch.float64)
    given = {"k": kda.l2norm(k), "v": v, "g": g, "b": beta}
    state = torch.zeros(batch, 16, 8, 8, dtype=torch.float64)

    def run(x: dict[str, Tensor], q: Tensor) -> Tensor:
        return kda.recurrent(q, x["k"], x["v"], x["g"], x["b"], state)[0]

    q = kda.l2norm(q)
    zeroed = {n: x.masked_fill(pad.view(1, -1, *[1] * (x.ndim - 2)), 0) if n in masked else x for n, x in given.items()}
    alone = run({n: x[:, ~pad] for n, x in given.items()}, q[:, ~pad])
    got = run(zeroed, q)[:, ~pad]
    assert least <= float((got - alone).norm() / alone.norm()) <= most


# --- P13: the softmax scale ---


@pytest.mark.parametrize(("n", "least", "most"), [(1, 0.0, 0.0), (2, 0.1, 0.35), (5, 0.2, 0.35)])
def test_p13_a_scale_of_the_latent_is_off_by_tens_of_percent_from_two_keys_on(
    n: int, least: float, most: float
) -> None:
    """Widths 192 and 576: no difference with one key, about a quarter with five."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, m, 32, d, generator=random, dtype=torch.float64) for m, d in ((1, 192), (n, 192), (n, 128))
    )
    wrong, right = (mla.dense(q, k, v, torch.tensor([[n - 1]]), scale=w**-0.5) for w in (576, 192))
    assert least <= float((wrong - right).norm() / right.norm()) <= most


# --- P17: ties in routing ---


class Chosen:
    """Gives every token of layer 1 these experts."""

    def __init__(self, ids: tuple[int, ...], inner: Probe) -> None:
        self.ids, self.inner = ids, inner

    def begin(self, step: Step) -> None:
        self.inner.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        def choose(x: Tensor) -> Tensor:
            return torch.tensor(self.ids).expand_as(x).contiguous()

        return self.inner.bind(site, layer, rule, choose if (site, layer) == ("router_ids", 1) else rounding)


def tied(name: str, x: Tensor) -> Tensor:
    """Choice scores 0.5, 0.7, 0.5, 0.5 and -0.5 for every token of layer 1."""
    if name == f"{ROUTER}.weight":
        return torch.zeros_like(x)
    return torch.tensor([0, 0.2, 0, 0, -1.0]) if name == f"{ROUTER}.e_score_correction_bias" else x


@pytest.mark.parametrize(
    ("ids", "changed", "right"), [((1, 0), 0, True), ((0, 1), 0, True), ((1, 2), 20, True), ((1, 4), 20, False)]
)
def test_p17_another_winner_of_a_tie_is_counted_and_is_no_defect(
    ids: tuple[int, int], changed: int, right: bool
) -> None:
    """{1, 0} in either order is the choice, {1, 2} is counted and within its bound, {1, 4} is a defect."""
    run = ran(None, Battery(prompts=[tiny.prompt(17)], continuations=[tiny.prompt(4)]), casts=edited(tied))
    found = replace(run, make=lambda tap: run.engine.build(probe=Chosen(ids, tap)))
    errors = found.replay.errors
    assert sum(errors[("router_ids", 1, phase)].changed for phase in ("prefill", "decode")) == changed
    expected = (RunClass.passed, None, None) if right else (RunClass.defect, "router_ids", 1)
    assert where(found.verdict) == expected


def test_p17_a_tie_is_taken_over_at_a_gap_of_zero() -> None:
    """A candidate's {1, 3} lies no distance from the oracle's choice: it is routing, and nothing is too far off."""
    casts = edited(tied)

    def make(probe: Probe) -> Model:
        return tiny.build(tiny.oracle(), casts, probe=probe)

    given, forced = tiny.prompt(6), tiny.prompt(3)
    routes = [r for r in oracle_pass(make, given, forced).choices if r[0] == 1]
    near, far = (adopted(make, given, forced, dict.fromkeys(routes, ids), within=0.0) for ids in ((1, 3), (1, 4)))
    assert (set(near.taken), near.wide) == (set(routes), {})
    assert {c.gap for c in near.taken.values()} == {0.0}
    assert (far.taken, set(far.wide)) == ({}, set(routes))

"""Local replay: a tap changes nothing, an operation's own error alone is seen, and a fault is found where it sits."""

from dataclasses import replace

import pytest
import tiny
import torch
from instruments import battery, engine, findings, of, planted, replay, worst
from torch import Tensor

from harness.compose import groups, load, named_variant
from harness.inspect import make_oracle
from harness.local_replay import LIMIT, LocalReplay, Meaning, local_replay, merged, replays
from harness.lockstep import walk
from harness.op_error import OpError, bounding_rule, enter, inner_units
from harness.oracle import oracle_recipe
from harness.probes import Tap
from variants.axes import ChunkForm, Execution, ExecutionAxes, Gemm, ImplAxes, KdaAxes, KdaCore, Stream, Variant
from variants.decode import Sequences
from variants.defects import DEFECTS, Spread
from variants.defects_kinds import Severity
from variants.dtypes import DType
from variants.model import Model
from variants.ops import kda, mla
from variants.ops.linear import LINEAR
from variants.recipe import Recipe, Rule, resolve
from variants.rounding import RoundAt, Step
from variants.sites import CHUNK_SITES, INSIDE_ATTENTION
from variants.weights import Weights

PROMPTS = tiny.ragged([5, 1, 9])
FORCED = [tiny.prompt(4, seed=70 + n) for n in range(3)]
BF16 = tiny.plain(Stream.bf16, Gemm.bf16)
F32 = tiny.plain(Stream.f32, Gemm.f32)
FAST = ("bf16_engine", "transformers_mirror", "f32_fast")
# At one layer these exchange no expert of this battery: the run is bit-identical to a correct one.
NOT_EXERCISED = {"router_bias_scaled", "rounded_correction_bias"}


class Nudge:
    """Changes one place of a run by a function of its value; the fault of these tests."""

    def __init__(self, place: tuple[str, int], change: RoundAt, inner: Tap) -> None:
        self.place, self.change, self.inner = place, change, inner

    def begin(self, step: Step) -> None:
        self.inner.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        def nudged(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            return self.change(y)

        return self.inner.bind(site, layer, rule, nudged if (site, layer) == self.place else rounding)


def tiny_replay(variant: Variant, fault: tuple[tuple[str, int], RoundAt] | None = None) -> LocalReplay:
    casts = tiny.casts()
    recipe = resolve(variant, casts.checkpoint.config)

    def make(tap: Tap) -> Sequences:
        probe = tap if fault is None else Nudge(*fault, tap)
        return Sequences(tiny.build(variant, casts, probe=probe), PROMPTS, 4)

    return local_replay(make, make_oracle(casts, recipe), recipe, PROMPTS, FORCED)


def test_a_core_of_torch_is_allowed_what_it_rounds_inside_a_chunk() -> None:
    """In vLLM's form output and state err by bf16 and nothing is in excess; a state twice as large still is."""
    kda = KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_form=ChunkForm.vllm)
    variant = replace(BF16, kda=kda)
    assert tiny_replay(variant).excess() == []
    found = tiny_replay(variant, (("kda_state", 0), lambda x: x * 2)).excess()
    assert ("kda_state", 0, "prefill") in found
    plain = replace(variant, kda=replace(kda, chunk_form=ChunkForm.plain))
    rounded = tiny_replay(plain, (("kda_state", 0), lambda x: x.bfloat16().float()))
    assert ("kda_state", 0, "prefill") in rounded.excess(), "a core that rounds nothing inside is held to float32"


@pytest.mark.parametrize("execution", [tiny.INCREMENTAL, tiny.RECOMPUTE, replace(tiny.INCREMENTAL, prefill_piece=2)])
@pytest.mark.parametrize("stream", [Stream.bf16, Stream.f32])
def test_a_tap_changes_no_bit(execution: object, stream: Stream) -> None:
    """A run with every place tapped gives the logits of the run without, bit for bit, and every layer was seen."""
    variant = tiny.plain(stream, Gemm.bf16_f32out, execution=execution)  # pyright: ignore[reportArgumentType]
    casts, tap = tiny.casts(), Tap()
    plain, tapped = tiny.build(variant, casts), tiny.build(variant, casts, probe=tap)
    for step in walk([plain, tapped], PROMPTS, FORCED):
        assert torch.equal(*step.logits)
        assert {layer for _, layer in tap.values} == set(range(-1, tiny.ODD.num_layers + 1))


@pytest.mark.parametrize("execution", [tiny.INCREMENTAL, replace(tiny.INCREMENTAL, prefill_piece=6)])
def test_an_oracle_that_runs_in_chunks_is_compared_inside_them(execution: ExecutionAxes) -> None:
    """Chunks of 3 over ragged rows: the same code in float64 leaves nothing, float32 stays within its bound, and a
    state that is lost between chunks is seen at the place inside the chunk."""
    kda = KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=3)
    casts, variant = tiny.casts(), replace(F32, kda=kda, execution=execution)
    recipe = resolve(variant, casts.checkpoint.config)
    exact = recipe.at_precision(DType.f64)

    def chunks(at: Recipe, fault: RoundAt | None = None) -> LocalReplay:
        def make(tap: Tap) -> Sequences:
            probe = tap if fault is None else Nudge(("kda_h", 0), fault, tap)
            return Sequences(Model(tiny.ODD, at, Weights(casts, at.semantics), probe=probe), PROMPTS, 4)

        oracle = lambda probe: Model(tiny.ODD, exact, Weights(casts, exact.semantics), probe=probe)  # noqa: E731
        return local_replay(make, oracle, at, PROMPTS, FORCED)

    same = chunks(exact)
    assert all(e.error2 == 0 for e in same.errors.values())
    assert set(CHUNK_SITES) <= {site for site, _ in same.compared}
    assert chunks(recipe).excess() == []
    assert chunks(recipe, torch.zeros_like).excess()[0] == ("kda_h", 0, "prefill")


def test_taps_hold_one_step() -> None:
    """Memory is bounded by one step: what was tapped in a step is gone in the next."""
    tap = Tap()
    sizes = []
    for _ in walk([tiny.build(BF16, tiny.casts(), probe=tap)], PROMPTS, FORCED):
        sizes.append(tap.values[("input_norm", 0)].shape[1])
    assert sizes == [9, 1, 1, 1]


@pytest.mark.parametrize("mode", list(Execution))
def test_the_oracles_own_algorithms_leave_nothing(mode: Execution) -> None:
    """The oracle's recipe against itself: zero error at every place that produces a value, in every step."""
    casts = tiny.casts()
    recipe = oracle_recipe(casts.checkpoint.config).with_execution(mode=mode)

    taps: list[Tap] = []

    def make(tap: Tap) -> Sequences:
        taps.append(tap)
        return Sequences(Model(tiny.ODD, recipe, Weights(casts, recipe.semantics), probe=tap), PROMPTS, 4)

    found = local_replay(make, make_oracle(casts, recipe), recipe, PROMPTS, FORCED)
    assert all(e.error2 == 0 and e.worst == 0 for e in found.errors.values())
    assert found.compared == {p for p in taps[0].values if p[0] not in INSIDE_ATTENTION}
    assert len(found.compared) > 80


def test_only_the_faulty_operation_errs() -> None:
    """A fault of a quarter at one place is found there alone: nothing downstream of it is in excess."""
    found = tiny_replay(BF16, (("o_norm", 0), lambda x: x * 1.25))
    assert {key[:2] for key in found.excess()} == {("o_norm", 0)}
    assert not tiny_replay(BF16).excess()


def test_a_value_that_is_not_finite_is_of_the_operation_that_made_it() -> None:
    """A NaN spreads over all that follows, and is held against the one place where it came from.

    In float32: at these odd widths some libraries' bf16 products reach into the next row, whose NaN is then really
    made of numbers.
    """

    def break_one(x: Tensor) -> Tensor:
        y = x.clone()
        y[1, 0, 3] = float("nan")
        return y

    found = tiny_replay(F32, (("post_attn_norm", 1), break_one))
    assert {key[:2] for key in found.excess()} == {("post_attn_norm", 1)}
    error = found.errors[("post_attn_norm", 1, "prefill")]
    assert (error.non_finite, error.first, error.rows) == (1, (1, 0), {1})


def test_what_fills_up_a_shorter_row_counts_nowhere() -> None:
    """Garbage in the pads of ragged rows is no error; the same garbage in a real token is."""

    def spoil(column: int) -> RoundAt:
        def change(x: Tensor) -> Tensor:
            if x.shape[1] == 1:
                return x
            y = x.clone()
            y[1, column:] = 1e6
            return y

        return change

    place = ("post_attn_norm", 0)
    assert not tiny_replay(BF16, (place, spoil(1))).excess()
    assert tiny_replay(BF16, (place, spoil(0))).errors[(*place, "prefill")].first == (1, 0)


def test_keys_that_fill_up_a_shorter_row_count_nowhere() -> None:
    """A value with one row a key is compared up to each row's own number of keys."""
    step = Step("decode", (0, 1), (4, 1), (1, 1))
    mine, theirs = torch.ones(2, 5, 3).double(), torch.ones(2, 5, 3).double()
    theirs[1, 2:] = 7.0
    clean, dirty = OpError(), OpError()
    enter(clean, mine, theirs, rule=Rule(), step=step, site="mla_k")
    theirs[1, 1] = 7.0
    enter(dirty, mine, theirs, rule=Rule(), step=step, site="mla_k")
    assert (clean.error2, clean.worst, clean.positions) == (0, 0, 7)
    assert (dirty.first, dirty.over) == ((1, 1), 1)


def test_several_meanings_share_one_run() -> None:
    """Replays walked together are those walked alone, and `wanted` leaves out comparison, not substitution."""
    casts = tiny.casts()
    recipe = resolve(BF16, casts.checkpoint.config)
    oracle = make_oracle(casts, recipe)

    def make(tap: Tap) -> Sequences:
        return Sequences(tiny.build(BF16, casts, probe=tap), PROMPTS, 4)

    only = Meaning(oracle, recipe, lambda site, layer: (site, layer) == ("combine", 2))
    both, one = replays(make, [Meaning(oracle, recipe), only], PROMPTS, FORCED)
    alone = local_replay(make, oracle, recipe, PROMPTS, FORCED)
    assert both.errors == alone.errors
    assert one.errors == {k: e for k, e in alone.errors.items() if k[:2] == ("combine", 2)}


def test_merged_batteries_number_their_rows() -> None:
    """The errors of parts add up, and a bad place is reported with the part that it came from."""
    a = OpError(count=2, error2=1.0, worst=2.0, worst_at=(0, 3), positions=2, seen={0})
    b = OpError(count=3, error2=2.0, worst=9.0, worst_at=(0, 5), first=(0, 4), over=1, positions=3, seen={0}, rows={0})
    key = ("beta", 0, "prefill")
    found = merged([LocalReplay({key: e}, frozenset({key[:2]})) for e in (a, b)]).errors[key]
    assert (found.count, found.error2, found.positions, found.over) == (5, 3.0, 5, 1)
    assert (found.worst, found.worst_at, found.first) == (9.0, (1, 5), (1, 4))
    assert (found.seen, found.rows) == ({0, 1}, {1})


@pytest.mark.parametrize("algorithm", [*kda.CORES, *mla.CORES, *mla.LATENT_CORES, *mla.PER_HEAD, *LINEAR])
def test_a_batch_invariant_form_may_err_as_its_other_form_does(algorithm: str) -> None:
    """`chunk_rows` had the bound of a plain sum, eight times too tight: a correct `paged_batch` was called a defect."""
    rule = resolve(F32, tiny.casts().checkpoint.config).rule("kda_core", 0, "prefill")
    units = [inner_units(replace(rule, algorithm=name)) for name in (algorithm, algorithm.removesuffix("_rows"))]
    assert units[0] == units[1]


@pytest.mark.parametrize(
    "words",
    [
        ["variant=llama_cpp_f16_kv"],
        ["variant=llama_cpp_flash"],
        ["variant=f32", "variant.mla.probs=bf16"],
        ["variant=f32", "variant.mla.probs=f16", "variant.mla.prefill=flash", "variant.mla.decode=absorbed"],
    ],
)
def test_what_attention_rounds_inside_is_allowed_it(words: list[str]) -> None:
    """Latents and probabilities are rounded where no value is replayed; their core errs by it, and by little more."""
    one = of(load(words).variant)
    found = replay(None, one.recipe, over=battery((0,), 3))
    core = [e for (site, _, _), e in found.errors.items() if site == "mla_core"]
    assert 0.01 < max(e.worst for e in core) < LIMIT / 2
    assert not any(e.in_excess for e in found.errors.values())


@pytest.mark.parametrize("name", ["", "f64_islands", "bf16_engine", "transformers_mirror", "paged_absorbed"])
def test_a_core_that_rounds_no_more_inside_has_its_own_bound(name: str) -> None:
    """Where nothing inside is narrower than core and output, nothing more is allowed: faults would hide there."""
    recipe = engine(name).recipe
    for phase in ("prefill", "decode"):
        assert bounding_rule(recipe, ("mla_core", 3), phase) == recipe.rule("mla_core", 3, phase)


@pytest.mark.parametrize("name", FAST)
def test_a_correct_variant_is_within_its_bound(name: str) -> None:
    """No place of a named variant is in excess, and the worst is under half of what would be."""
    found = replay(None, engine(name).recipe, over=battery(tokens=3))
    key, error = worst(found)
    assert error.worst < LIMIT / 2, key
    assert not any(e.changed for e in found.errors.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in groups()["variant"] if named_variant(n).impl == ImplAxes()])
def test_every_variant_is_within_its_bound_at_every_precision(name: str) -> None:
    """No place of any named variant is in excess on gate, as it runs and with every format raised."""
    recipe = engine(name).recipe
    for at in (recipe, recipe.at_precision(DType.f32), recipe.at_precision(DType.f64)):
        found = replay(None, at, over=battery(tuple(range(8)), 8))
        assert not found.excess(), worst(found)


@pytest.mark.parametrize(
    "name",
    ["gate_bias_scaled", "rounded_A_log", "l2_eps_k", "state_reset", "nan_in_attention", "norm_eps_latent",
     "router_bias_left_out", "mla_cache_not_written"],
)  # fmt: skip
def test_a_defect_at_its_lightest_is_found_where_it_sits(name: str) -> None:
    """The first finding names the site and the layer of a defect planted at one layer."""
    p = planted(name)
    first = findings(replay(p))[0]
    assert first.site in p.defect.sites
    assert first.layer == p.layers[0]


@pytest.mark.slow
@pytest.mark.parametrize("severity", [Severity.heavy, Severity.medium])
@pytest.mark.parametrize("name", list(DEFECTS))
def test_every_defect_is_found_where_it_sits(name: str, severity: Severity) -> None:
    """The first finding names site and layer, in float64 where float32's own rounding covers the fault.

    What exchanges no expert of the battery is not there to be found.
    """
    p, over, recipe = planted(name, severity, Spread.one), battery((0, 2, 4), 6), engine().recipe
    found = findings(replay(p, over=over)) or findings(replay(p, recipe.at_precision(DType.f64), over=over))
    if not found:
        assert name in NOT_EXERCISED
        return
    assert found[0].site in p.defect.sites
    assert found[0].layer == p.layers[0]


def test_a_clean_carrier_has_no_finding() -> None:
    """What the planted runs above differ from gives no finding in float64, where the bounds are narrowest."""
    assert not findings(replay(None, engine().recipe.at_precision(DType.f64)))

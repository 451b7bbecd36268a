"""Planted defects: that they are there, do what they say where they say it, and cannot be reached by a user."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.golden import load_golden
from harness.lockstep import walk
from harness.probes import Place, Tap
from variants.axes import Execution, ExecutionAxes, KdaAxes, KdaCore, MlaAxes, MlaCore, Variant
from variants.decode import single_pass
from variants.defects import DEFECTS, Planted, Spread, build, plant
from variants.defects_kinds import AtSite, Extent, Family, InParameter, Kind, Needs, Run, Severity, Target, Visit
from variants.dtypes import DType
from variants.errors import UsageError
from variants.model import Model
from variants.model_config import LayerKind
from variants.sites import CHUNK_SITES, layer_sites

ROOT = Path(__file__).parents[1]
CARRIER = Variant(
    kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=4),
    mla=MlaAxes(prefill=MlaCore.dense_f32, decode=MlaCore.absorbed),
    execution=ExecutionAxes(mode=Execution.incremental),
)
INSIDE = (*CHUNK_SITES, "mla_scores", "mla_probs")  # local replay compares the core that they are part of
ONE_OF_EACH = {d.family: d.name for d in reversed(DEFECTS.values())}
NAMES = list(DEFECTS)
# At one layer these change no expert set of the battery: there is nothing to see, which is what `exercise` says.
UNSEEN_AT_ONE_LAYER = {"router_bias_scaled", "rounded_correction_bias"}


@cache
def engine() -> LocalEngine:
    return LocalEngine(shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu"), CARRIER, name="carrier")


@cache
def battery() -> tuple[list[tuple[int, ...]], list[list[int]]]:
    gate = load_golden("gate")
    return list(gate.prompts[:4]), [[int(x) for x in row[:5]] for row in gate.tokens[0][:4]]


def planted(name: str, severity: Severity = Severity.heavy, spread: Spread = Spread.all) -> Planted:
    return plant(DEFECTS[name], severity=severity, layers=spread, config=engine().casts.checkpoint.config)


def logits(*models: Model) -> list[Tensor]:
    """Teacher-forced logits [T, B, V] of each model, all in one walk."""
    steps = [p.logits for p in walk(models, *battery())]
    return [torch.stack([s[i] for s in steps]) for i in range(len(models))]


@cache
def clean() -> Tensor:
    return logits(engine().build())[0]


def first_difference(p: Planted) -> Place | None:
    """The first place of the first step at which the planted run's values differ from the clean run's."""
    good, bad = Tap(), Tap()
    recipe = engine().recipe
    for _ in walk([engine().build(probe=good), build(engine(), recipe, p, probe=bad)], *battery()):
        for place, value in bad.values.items():
            if place[0] not in INSIDE and not torch.equal(value, good.values[place]):
                return place
    return None


def target(amount: object, step_lengths: tuple[int, ...] = (8,)) -> Target:
    from variants.rounding import Step

    t = Target(amount, (0,), engine().casts.checkpoint.config)  # pyright: ignore[reportArgumentType]
    t.clock.begin(Step("prefill", tuple(range(len(step_lengths))), (0,) * len(step_lengths), step_lengths))
    return t


def test_there_are_sixty_in_fourteen_families() -> None:
    """At least 60 defects stand in the families of the practice cases, five or more in each."""
    assert len(DEFECTS) >= 60
    for family in Family:
        assert sum(d.family is family for d in DEFECTS.values()) >= 5, family


def test_severities_are_the_fixed_ones() -> None:
    """Scales are off by 10, 1 and 0.1 %, eps by 100, 10 and 2; faults hit all, one in eight or one; e4m3, bf16, f16."""
    assert Kind.scale.value == (0.1, 0.01, 0.001)
    assert Kind.eps.value == (100, 10, 2)
    assert Kind.extent.value == (Extent.all, Extent.eighth, Extent.one)
    assert Kind.rounding.value == (DType.e4m3, DType.bf16, DType.f16)
    assert target(0.001).factor == 1.001
    assert target(2.0).factor == 2


def test_extents_hit_what_they_say() -> None:
    """Of 64 indices a fault hits all, eight or one."""
    hits = [int(target(extent).channels(64).sum()) for extent in Extent]
    assert hits == [64, 8, 1]


@pytest.mark.parametrize("name", NAMES)
def test_site_is_one_of_the_layer(name: str) -> None:
    """The site where a defect must be found is a site of every layer that it can sit in."""
    config, defect = engine().casts.checkpoint.config, DEFECTS[name]
    for layer in defect.needs.layers(config):
        assert set(defect.sites) <= set(layer_sites(config, layer))


def test_nothing_that_a_user_names_leads_here() -> None:
    """Only tests and the power experiment name planted defects."""
    allowed = {"harness/power.py", "experiments/power.py", "experiments/power_outside.py", "harness/outside_power.py"}
    sources = [p for folder in ("variants", "harness", "experiments", "conf") for p in (ROOT / folder).rglob("*.*")]
    texts = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sources if p.suffix in (".py", ".yaml")}
    naming = {
        name for name, text in texts.items() if re.search(r"\bdefects(_\w+)?\b (?:import)|variants\.defects", text)
    }
    naming = {name for name in naming if not name.startswith("variants/defects")}
    assert naming <= allowed
    assert "from variants.defects" in Path(__file__).read_text(), "the pattern that is searched for is the real one"


def test_needs_a_layer_of_its_kind() -> None:
    """A defect whose layer is absent, or a layer of another kind, is refused with what it needs."""
    config = engine().casts.checkpoint.config
    kda_only = replace(config, layer_kinds=(LayerKind.kda,) * config.num_layers)
    with pytest.raises(UsageError, match="needs an MLA layer; this model has none"):
        plant(DEFECTS["mla_scaled"], severity=Severity.heavy, layers=Spread.one, config=kda_only)
    with pytest.raises(UsageError, match=r"needs an MLA layer: \[3, 7\], got layers \[0\]"):
        plant(DEFECTS["mla_scaled"], severity=Severity.heavy, layers=[0], config=config)


def test_code_that_never_runs_is_refused() -> None:
    """A fault inside chunks is refused under a core that has none, a hand-over's under recompute."""
    for name, variant in (
        ("chunk_state_forgotten", replace(CARRIER, kda=KdaAxes(prefill=KdaCore.recurrent, decode=KdaCore.recurrent))),
        ("state_reset", Variant()),
    ):
        other = LocalEngine(engine().casts, variant, name="other")
        with pytest.raises(UsageError, match="never runs"):
            build(other, other.recipe, planted(name))


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_one_of_each_family_changes_the_logits(name: str) -> None:
    """At its heaviest, at every layer of its kind, a defect changes the logits of the gate battery."""
    assert not torch.equal(logits(build(engine(), engine().recipe, planted(name)))[0], clean())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_changes_a_value_at_its_site(name: str) -> None:
    """At its heaviest a defect first changes a value at its own site and layer, at one layer and at all of them."""
    for spread in Spread:
        p = planted(name, spread=spread)
        found = first_difference(p)
        if found is None:
            assert name in UNSEEN_AT_ONE_LAYER, (name, spread)
            assert spread is Spread.one
        else:
            assert found[0] in p.defect.sites, (name, spread, found)
            assert found[1] == p.layers[0], (name, spread, found)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_one_of_each_family_changes_its_site_first(name: str) -> None:
    """The first value that a defect changes is at its site, in its layer."""
    p = planted(name, Severity.medium, Spread.one)
    found = first_difference(p)
    assert found is not None
    assert found[0] in p.defect.sites
    assert found[1] == p.layers[0]


@pytest.mark.parametrize(
    "name", ["index_kda_heads", "mla_own_key_unseen", "norm_centred", "router_last_expert_lost", "beta_doubled"]
)
def test_nothing_changes_before_the_first_bad_position(name: str) -> None:
    """A fault at position 3 leaves the logits of positions 0 to 2 bit for bit as they were and changes a later one."""
    prompts, _ = battery()
    start, rest = [prompts[2][:1]], [list(prompts[2][1:])]
    good = single_pass(engine().build(), start, rest)[0]
    bad = single_pass(build(engine(), engine().recipe, planted(name, Severity.light)), start, rest)[0]
    assert torch.equal(good[:3], bad[:3])
    assert not torch.equal(good[3:], bad[3:])


def test_a_fault_of_carried_state_spares_the_first_step() -> None:
    """A state that is read wrongly at hand-overs leaves the prefill's logits bit-identical.

    Of another head: one that is transposed has other strides too, by which a library may order its sums anew.
    """
    bad = logits(build(engine(), engine().recipe, planted("state_heads_swapped")))[0]
    assert torch.equal(bad[0], clean()[0])
    assert not torch.equal(bad[1], clean()[1])


def test_position_zero_of_a_wrong_softmax_scale_is_exact() -> None:
    """With one key a softmax has no scale: position 0 stays bit-identical under a wrong one, later ones do not."""
    prompts, _ = battery()
    start, rest = [prompts[0][:1]], [list(prompts[0][1:])]
    good = single_pass(engine().build(), start, rest)[0]
    bad = single_pass(build(engine(), engine().recipe, planted("mla_scaled")), start, rest)[0]
    assert torch.equal(good[0], bad[0])
    assert not torch.equal(good[1:], bad[1:])


def test_clean_models_stay_clean() -> None:
    """Planting leaves the shared checkpoint and later models untouched."""
    before = clean()
    for name in ("gate_bias_scaled", "index_expert_row", "norm_eps_input", "slot_state_stale"):
        build(engine(), engine().recipe, planted(name))
    assert torch.equal(logits(engine().build())[0], before)


def test_two_runs_of_one_planting_do_not_meet() -> None:
    """Two planted models that run in lockstep count their own hand-overs: each gives what it gives alone."""
    p = planted("state_reset", Severity.light)
    alone = logits(build(engine(), engine().recipe, p))[0]
    together = logits(build(engine(), engine().recipe, p), build(engine(), engine().recipe, p))
    assert torch.equal(together[0], alone)
    assert torch.equal(together[1], alone)


def change(name: str, x: Tensor, t: Target, seen: dict[str, Tensor] | None = None) -> Tensor:
    mechanism = DEFECTS[name].mechanism
    if isinstance(mechanism, InParameter):
        return mechanism.change(x, t)
    assert isinstance(mechanism, AtSite)
    return mechanism.change(x, t, Visit(mechanism.sites[0], 0, seen or {}))


def test_reversed_taps_give_the_known_wrong_values() -> None:
    """Taps 0.1, -0.3, 0.7, 0.5 turned round give -0.1, 0.4, 1.4 and 2.4 after prompts of 1 to 4 of the inputs 1..5."""
    taps = torch.tensor([0.1, -0.3, 0.7, 0.5], dtype=torch.float64).view(1, 1, 4)
    wrong = change("conv_taps_reversed", taps, target(Extent.all)).view(4)
    inputs = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5], dtype=torch.float64)
    got = [float(wrong @ inputs[n + 1 : n + 5]) for n in range(4)]
    assert got == pytest.approx([-0.1, 0.4, 1.4, 2.4], abs=1e-12)  # sums of four decimal fractions


@pytest.mark.parametrize(
    ("name", "expected"), [("l2_clamped", (1, 1, 1)), ("l2_eps_on_mean", (0.9999, 0.0880, 0.0088))]
)
def test_other_l2_norms_show_at_small_vectors(name: str, expected: tuple[float, ...]) -> None:
    """Vectors of norm 1, 1e-3 and 1e-4 leave the clamped form with norm 1 and the mean form far under it."""
    size = torch.tensor([1, 1e-3, 1e-4], dtype=torch.float64).view(1, 3, 1, 1)
    vector = torch.zeros(1, 3, 1, 128, dtype=torch.float64)
    vector[..., 0] = 1
    x = vector * size
    seen = {"short_conv": torch.cat([x, x, x], -1).flatten(2)}
    got = change(name, x, target(Extent.all, (3,)), seen).norm(dim=-1).flatten().tolist()
    assert got == pytest.approx(expected, abs=5e-5)  # four printed places


def test_bias_rows_that_are_constant_do_not_show_a_per_head_read() -> None:
    """dt_bias read once a head is invisible where a head's channels agree, and visible where they do not."""
    config = engine().casts.checkpoint.config
    heads = torch.arange(config.kda_num_heads, dtype=torch.float64).repeat_interleave(config.kda_head_dim)
    assert torch.equal(change("gate_bias_per_head", heads, target(Extent.all)), heads)
    varied = torch.arange(heads.shape[0], dtype=torch.float64)
    assert not torch.equal(change("gate_bias_per_head", varied, target(Extent.all)), varied)


def test_selection_bias_in_bf16_collapses() -> None:
    """256 biases evenly over 6.817..7.063 keep nine values in bf16."""
    bias = torch.linspace(6.817, 7.063, 256, dtype=torch.float64)
    assert change("rounded_correction_bias", bias, target(DType.bf16)).unique().numel() == 9


def test_run_needs_are_named() -> None:
    """Every defect that only some code runs says so, and says what input would exercise it."""
    for defect in DEFECTS.values():
        if defect.run:
            assert defect.exercise, defect.name
        if defect.family is Family.chunk:
            assert Run.chunk in defect.run
        assert defect.needs in Needs

"""A product's weight, and an operand by override, are rounded where no value shows it: replay and members do so too."""

from dataclasses import replace

import pytest
import tiny
import torch
from instruments import shipped

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.golden import load_golden
from harness.inspect import make_oracle, make_replay
from harness.local_replay import Key, LocalReplay, local_replay
from harness.rounding_noise import twin
from harness.roundings import roundings
from variants.axes import Gemm, Param, ParamAxes, SiteOverride, Store, Stream, Variant
from variants.decode import Sequences
from variants.dtypes import DType
from variants.recipe import Recipe, resolve

F32 = tiny.plain(Stream.f32, Gemm.f32)
PROMPTS, FORCED = tiny.ragged([5, 9]), [[3, 1, 4], [1, 5, 9]]
NARROW = ("q_proj", "expert_gate_up", "lm_head")


def overridden(*sites: str, layers: tuple[int, ...] = (), output: Store = Store.keep) -> Variant:
    return replace(F32, override={s: SiteOverride(input=Store.bf16, output=output, layers=layers) for s in sites})


def recipe(variant: Variant) -> Recipe:
    return resolve(variant, tiny.ODD)


def replayed(
    ran: Variant, declared: Variant, *, exact: bool = False, stored: torch.dtype = torch.bfloat16
) -> LocalReplay:
    casts, at = tiny.casts(dtype=stored), recipe(declared)
    oracle = (make_oracle if exact else make_replay)(casts, at)
    return local_replay(
        lambda tap: Sequences(tiny.build(ran, casts, probe=tap), PROMPTS, 4), oracle, at, PROMPTS, FORCED
    )


def sites(found: list[Key]) -> set[str]:
    return {site for site, _, _ in found}


def test_an_operand_that_one_product_rounds_is_no_error_of_it() -> None:
    """Held against a product of the operand as it arrives it would be one, at each of these products."""
    variant = overridden(*NARROW)
    assert replayed(variant, variant).excess() == []
    assert sites(replayed(variant, variant, exact=True).excess()) == set(NARROW)


def test_one_that_is_not_declared_is_found_at_its_layer() -> None:
    """Layer 0 declares it and layer 2 does it too."""
    found = replayed(overridden("q_proj"), overridden("q_proj", layers=(0,))).excess()
    assert {(site, layer) for site, layer, _ in found} == {("q_proj", 2)}


def test_a_wider_reading_than_declared_is_found() -> None:
    assert sites(replayed(F32, overridden("q_proj")).excess()) == {"q_proj"}


def test_a_rounded_product_of_a_rounded_operand_is_rounded_to_the_nearest() -> None:
    variant = replace(F32, override=overridden("q_proj", output=Store.bf16).override)
    found = roundings(LocalEngine(shipped(), variant, name="own"), Battery.of(load_golden("gate")))
    assert found.findings() == []
    assert found.places == 6
    assert found.largest == 0.0


@pytest.mark.parametrize("gemm", [Gemm.bf16_f32out, Gemm.bf16, Gemm.f16])
def test_a_weight_stored_wider_than_a_product_reads_it_is_no_error_of_it(gemm: Gemm) -> None:
    """A checkpoint in float32 under products in bf16: the recipe names the format of both operands."""
    variant = replace(F32, gemm=gemm)
    assert replayed(variant, variant, stored=torch.float32).excess() == []
    rounds = replayed(variant, variant, stored=torch.float32, exact=True).excess()
    assert "q_proj" in sites(rounds) or gemm is not Gemm.bf16_f32out


def test_a_weight_that_is_rounded_undeclared_is_found() -> None:
    params = replace(F32, params=ParamAxes(weights=Param.bf16))
    assert "q_proj" in sites(replayed(params, F32, stored=torch.float32).excess())


def test_members_read_weights_as_the_variant_does() -> None:
    """Its operand is a place of its own, which has its noise; its weight is the same in all members."""
    rule = twin(recipe(replace(F32, gemm=Gemm.bf16_f32out))).rule("q_proj", 0)
    assert (rule.input, rule.accum, rule.weights) == (DType.f64, DType.f64, DType.bf16)
    assert twin(recipe(F32)).rule("q_proj", 0).weights is DType.f32


def test_members_read_it_as_the_variant_does() -> None:
    """All else is in the format of the twin; raised to float64 the recipe has no operand of its own."""
    at = recipe(overridden("q_proj", layers=(2,)))
    assert at.own_operands() == {("q_proj", 2): DType.bf16}
    assert twin(at).rule("q_proj", 2).input is DType.bf16
    assert twin(at).rule("q_proj", 2).accum is DType.f64
    assert twin(at).rule("q_proj", 0).input is DType.f64
    assert at.at_precision(DType.f64).own_operands() == {}
    assert recipe(tiny.plain(Stream.bf16, Gemm.bf16)).own_operands() == {}

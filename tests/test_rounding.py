"""`round_at` does what a rule says, hands the place to a probe, and is nothing at all where there is nothing to do."""

import pytest
import torch
from tiny import ODD, Watcher, build, casts, every_logit, oracle, plain, prompt
from torch import Tensor

from variants import decode
from variants.axes import Gemm, NormAxes, NormVariance, Stream, Variant
from variants.dtypes import DType, dtype_of, narrowest_holding
from variants.recipe import Recipe, Rule, resolve
from variants.rounding import NoProbe, RoundAt, Step, pinned, round_at, rounding_of


def rule(output: DType | None, storage: DType | None = None) -> Rule:
    return Rule(output=output, storage=storage or output)


X = torch.tensor([1.0, 1 + 2.0**-9, 1 + 2.0**-8 + 2.0**-30, 3.14159], dtype=torch.float64)


def test_a_value_that_is_kept_has_no_rounding() -> None:
    """Without an output format the bound place is None, and the plain path does not call it."""
    assert rounding_of(rule(None)) is None
    recipe = resolve(Variant(), ODD)
    assert round_at(recipe, NoProbe(), ("conv_state", 0), phase="prefill") is None


def test_a_structural_store_changes_the_buffer_and_one_in_place_does_not() -> None:
    """bf16 output: in bf16 storage the buffer is narrow, in float32 storage only the values are; the same values."""
    structural, in_place = rounding_of(rule(DType.bf16)), rounding_of(rule(DType.bf16, DType.f32))
    assert structural is not None
    assert in_place is not None
    assert structural(X).dtype == torch.bfloat16
    assert in_place(X).dtype == torch.float32
    assert torch.equal(structural(X).float(), in_place(X))
    assert structural(X)[2] == 1 + 2.0**-7  # once: by way of float32 it would be 1


def test_a_rounding_that_the_operation_already_did_is_left_out() -> None:
    """Only where the format that arrives is known to be output and storage both."""
    recipe = resolve(plain(Stream.bf16, Gemm.bf16), ODD)
    assert round_at(recipe, NoProbe(), ("q_proj", 0), phase="prefill", arrives=DType.bf16) is None
    assert round_at(recipe, NoProbe(), ("q_proj", 0), phase="prefill", arrives=DType.f32) is not None
    assert round_at(recipe, NoProbe(), ("q_proj", 0), phase="prefill") is not None
    in_place = resolve(plain(Stream.bf16_in_place, Gemm.bf16_f32out), ODD)
    assert round_at(in_place, NoProbe(), ("attn_residual", 0), phase="prefill", arrives=DType.f32) is not None


def test_a_format_of_the_run_is_exact() -> None:
    """`pinned` widens without a change and returns what is already there."""
    x = X.to(torch.bfloat16)
    assert torch.equal(pinned(x, DType.f64).to(torch.bfloat16), x)
    assert pinned(x, DType.bf16) is x


class Recorder:
    """Keeps what each place was bound with and the dtypes and formats that it gave."""

    def __init__(self) -> None:
        self.bound: list[tuple[str, int]] = []
        self.seen: dict[tuple[str, int, str], list[Tensor]] = {}
        self.steps: list[Step] = []

    def begin(self, step: Step) -> None:
        self.steps.append(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        self.bound.append((site, layer))

        def record(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            self.seen.setdefault((site, layer, self.steps[-1].phase), []).append(y.clone())
            return y

        return record


VARIANTS = {
    "oracle": oracle(),
    "f32": plain(Stream.f32, Gemm.f32),
    "bf16": plain(Stream.bf16, Gemm.bf16),
    "in place": plain(Stream.bf16_in_place, Gemm.bf16_f32out),
    "f16": plain(Stream.f16, Gemm.f16),
}


def recorded(variant: Variant) -> tuple[Recipe, Recorder, Tensor]:
    recorder = Recorder()
    model = build(variant, casts(), probe=recorder)
    runs = decode.steps(model, [prompt(9)], 2, lambda _, logits: decode.greedy(logits))
    return model.recipe, recorder, runs[-1].logits


@pytest.mark.parametrize("name", VARIANTS)
def test_every_value_leaves_its_place_as_its_rule_says(name: str) -> None:
    """Storage is the rule's and no value is finer than its output format, at every place of both phases."""
    recipe, recorder, _ = recorded(VARIANTS[name])
    for (site, layer, phase), values in recorder.seen.items():
        declared = recipe.rule(site, layer, phase)
        for x in values if site != "router_ids" else []:
            assert declared.storage is None or dtype_of(x) is declared.storage, (site, layer)
            fits = declared.output is None or narrowest_holding(x).precision <= declared.output.precision
            assert fits or dtype_of(x) is declared.output, (site, layer)


@pytest.mark.parametrize("name", VARIANTS)
def test_watching_changes_no_bit(name: str) -> None:
    """A run with every value recorded gives the logits of the plain run."""
    _, _, watched = recorded(VARIANTS[name])
    plainly = decode.steps(build(VARIANTS[name], casts()), [prompt(9)], 2, lambda _, logits: decode.greedy(logits))
    assert torch.equal(watched, plainly[-1].logits)


def test_a_probe_is_told_of_every_step() -> None:
    """Phase, slots, first positions and lengths of each forward."""
    recorder = recorded(VARIANTS["f32"])[1]
    assert [(s.phase, list(s.slots), list(s.starts), list(s.lengths)) for s in recorder.steps] == [
        ("prefill", [0], [0], [9]),
        ("decode", [0], [9], [1]),
    ]


def test_what_a_probe_recorded_is_not_overwritten_later() -> None:
    """A carried value taken at its place without a copy survives the reset of its slot and later steps."""
    taken: list[Tensor] = []

    class Taker(Recorder):
        def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
            inner = super().bind(site, layer, rule, rounding)
            assert inner is not None
            return (lambda x: taken.append(inner(x)) or taken[-1]) if site == "kda_state" else inner

    model = build(VARIANTS["f32"], casts(), probe=Taker())
    state = model.new_state(slots=1, max_len=9)
    model.forward(torch.tensor([prompt(9)]), state, slots=[0], lengths=[9], phase="prefill")
    copies = [x.clone() for x in taken]
    state.reset([0])
    model.forward(torch.tensor([prompt(9)]), state, slots=[0], lengths=[9], phase="prefill")
    assert len(copies) == 2
    assert all(bool(x.any()) and torch.equal(x, y) for x, y in zip(copies, taken, strict=False))


def summed(variance: NormVariance) -> Variant:
    return plain(Stream.bf16, Gemm.bf16, norm=NormAxes(variance=variance))


@pytest.mark.parametrize("variance", NormVariance)
def test_sums_that_are_rounded_as_they_are_added_keep_every_bit(variance: NormVariance) -> None:
    """With no probe two bfloat16 values are added by the library; a probe that changes nothing has the sums apart."""
    made, models = casts(), []
    for probe in (None, Watcher()):
        models.append(build(summed(variance), made, probe=probe))
    assert torch.equal(*(every_logit(m, prompt(9)) for m in models))
    at_once = [[x.attn_residual.at_once for x in m.phases["prefill"].layers] for m in models]
    assert at_once == [[variance is NormVariance.stored] * 3, [False] * 3]


def test_a_norm_that_reads_the_unrounded_sum_would_show_it() -> None:
    """The comparison above can fail: added at once before such a norm, other logits come out."""
    made = casts()
    right = every_logit(build(summed(NormVariance.pre_store), made), prompt(9))
    model = build(summed(NormVariance.pre_store), made)
    for layer in model.phases["prefill"].layers:
        layer.attn_residual.at_once = layer.mlp_residual.at_once = True
    assert not torch.equal(every_logit(model, prompt(9)), right)

"""What joins a step may err where no probe looks: the run as it is and the run watched must have the same bits."""

from collections.abc import Callable

import pytest
import torch
from instruments import engine as shipped_engine
from instruments import shipped
from tiny import ODD, casts, prompt
from torch import Tensor

from harness.as_run import INSTRUMENT, as_run, chosen_as_watched, free_and_forced
from harness.compose import named_variant
from harness.divergence import Cause, Divergence, Side
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.gate import part_of, run_gate
from harness.golden import load_golden
from harness.verdict import RunClass
from harness.verdict_run import Question, judge_run
from variants import native_step
from variants.binding import Binder
from variants.native_step import Listing
from variants.ops.native_library import Code
from variants.rounding import NoProbe
from variants.runner import Runner

BATTERY = Battery(prompts=[prompt(4), prompt(9, seed=1), prompt(6, seed=2)], continuations=[[5, 8, 13, 21]] * 3)


def engine(name: str = "f32_native") -> LocalEngine:
    return LocalEngine(casts(ODD), named_variant(name), name=name)


@pytest.mark.parametrize(
    "name", ["f32_native", "f32_native_plain", "f32", "bf16_stream", "f64_islands", "paged_native", "paged_batch"]
)
def test_a_sound_variant_is_the_same_watched(name: str) -> None:
    """Two prompts of three, a prefill and four steps each; a fused step is compared with its operations."""
    found = as_run(engine(name), BATTERY)
    assert found.findings() == []
    assert found.tokens >= 8


def test_a_runner_that_decodes_another_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts together, unwatched and watched: the first logits that differ are a decode's."""
    right = Runner._forward

    def wrong(self: Runner, tokens: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        unwatched = isinstance(self.model.probe, NoProbe)
        return right(self, [t + unwatched for t in tokens], slots)

    monkeypatch.setattr(Runner, "_forward", wrong)
    (found,) = as_run(engine("paged_native"), BATTERY).findings()
    assert "prompt of 4 tokens, token 1 of its answer" in found.reason


def wrong_norm(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm before the experts of layer 1 without its weight."""

    def norm(b: Binder, name: str, site: str) -> Tensor:
        weight = right(b, name, site)
        return torch.ones_like(weight) if (b.layer, site) == (1, "post_attn_norm") else weight

    return norm


def no_shared_expert(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The shared expert's output is left out of layer 2's sum."""

    def mixture(put: Listing, b: Binder, x: Tensor) -> Tensor:
        out = right(put, b, x)
        if b.layer == 2:
            put.ops = [op for op in put.ops if op is not put.ops[-1]]  # the sum comes last
        return out

    return mixture


def stale_position(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention looks at one key too few."""

    def mla(put: Listing, b: Binder, x: Tensor, state: object, position: Tensor, slot: int) -> Tensor:
        out = right(put, b, x, state, position, slot)
        attention = next(op for op in put.ops if op.code == Code.attention)
        put.held.append(zero := torch.zeros(1, dtype=torch.int64))
        attention.p[3] = zero.data_ptr()
        return out

    return mla


@pytest.mark.parametrize(
    ("name", "fault", "layer"),
    [("_norm", wrong_norm, 2), ("_mixture", no_shared_expert, None), ("_mla", stale_position, 2)],
)
def test_a_fault_in_what_joins_a_step_is_found(
    name: str, fault: Callable[..., Callable[..., Tensor]], layer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first decode step, with the layer whose carried value shows it first; the last layer's shows in none."""
    monkeypatch.setattr(native_step, name, fault(getattr(native_step, name)))
    (found,) = as_run(engine(), BATTERY).findings()
    assert found.layer == layer
    assert "decode step 1 after 4 tokens" in found.reason
    assert "execution.fused" in found.reason


def test_free_and_forced_choose_alike_on_one_prefix() -> None:
    """Tokens after the first divergence stand on other prefixes and may differ; the diverging one may not."""
    golden = part_of(load_golden("gate"), prompts=2, tokens=4)
    free = golden.tokens[0].copy()
    free[0, 1:] += 1
    forced = golden.tokens[0].copy()
    forced[0, 1] += 1
    run = shipped_engine("f32_native")
    assert free_and_forced(run, golden, free, forced) == []
    forced[0, 1] += 1
    (found,) = free_and_forced(run, golden, free, forced)
    assert found.reason.startswith(f"p0[1]: runs freely to token {free[0, 1]}, forced along the same tokens to")
    assert free_and_forced(shipped_engine("paged_native"), golden, free, forced) == []


def test_every_length_of_a_fused_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at one position that only a middle prompt decodes at, and one far beyond every prompt, are found."""
    right = native_step.NativeStep.begin

    def planted(at: int) -> Callable[..., None]:
        def begin(self: native_step.NativeStep, token: Tensor, position: int) -> None:
            right(self, token + (position == at) * (1 if int(token) == 0 else -1), position)

        return begin

    for at in (9, 57):  # the middle prompt has 6 tokens and 4 forced
        monkeypatch.setattr(native_step.NativeStep, "begin", planted(at))
        (found,) = as_run(engine(), BATTERY).findings()
        assert "execution.fused" in found.reason


def test_a_token_that_the_watched_run_would_not_choose_is_told() -> None:
    """The margin of a divergence is of the watched run: where it favours the golden's token, another run chose."""
    sides = [Side(margin=m, sigma=0.1) for m in (-0.2, 0.0, 0.3, 9.9)]
    same = {"position": 2, "golden_token": 5, "token": 7, "margin": 1.0, "cause": Cause.rounding, "p": 0.5}
    d = [Divergence(prompt=i, candidate=s, golden=s, **same) for i, s in enumerate(sides)]  # pyright: ignore[reportArgumentType]
    assert chosen_as_watched(shipped_engine("f32_native"), d[:2]) == []
    (found,) = chosen_as_watched(shipped_engine("f32_native"), d)
    assert found.reason == "p3[2]: as it runs it chooses 7, its operations alone prefer 5 by 9.9 nat (2 places)"
    assert chosen_as_watched(shipped_engine("paged_native"), d) == []


def test_a_verdict_calls_it_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watched path is sound and so are all that look at it; the tokens come from the other."""
    monkeypatch.setattr(native_step, "_norm", wrong_norm(native_step._norm))
    golden, run = part_of(load_golden("gate"), prompts=2, tokens=2), shipped_engine("f32_native")
    reference = shipped_engine("bf16_engine").recipe
    question = Question(golden=golden, engine=run, casts=shipped(), declared=run.recipe, reference=reference, members=3)
    verdict = judge_run(question, run_gate(golden, run))[0]
    assert {f.instrument for f in verdict.findings} == {INSTRUMENT}
    assert (verdict.run_class, verdict.site, verdict.layer) == (RunClass.defect, "conv_state", 2)

"""Logits beside float64: the oracle's own distance is none, others' is what plain definitions say, and who may ask."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ODD, casts, prompt

from experiments.bench_floors import _beside_float64
from experiments.cli import main
from harness.compose import named_variant
from harness.engines.loaded import shared_casts
from harness.engines.local import LocalEngine, forced_logits
from harness.engines.logits import log_softmax
from harness.logit_error import OWN_EXPERTS, compared, float64_logits, logit_errors
from harness.probes import chain
from harness.routing import Forcing
from variants import decode
from variants.errors import EngineError
from variants.model import Model
from variants.recipe import Semantics
from variants.rounding import NoProbe, Probe
from variants.weights import Casts

NAMED = ("bf16_engine", "oracle")


def engine(name: str, made: Casts) -> LocalEngine:
    return LocalEngine(made, named_variant(name), name=name)


def test_layer_by_layer_is_the_ordinary_oracle() -> None:
    """On the shipped checkpoint: the logits of variant=oracle, prefilled and decoded, within 1e-12 of their norm."""
    made = shared_casts("assets/kimi-linear-12m", None, "cpu")
    ids, tokens = list(range(40, 57)), [7, 300, 41, 41, 1000, 5]
    streamed = float64_logits(made, ids, tokens, Semantics())
    plain = LocalEngine(made, named_variant("oracle"), name="oracle")
    ordinary = torch.cat(forced_logits(plain.model, [ids], [tokens]))
    assert streamed.dtype is torch.float64
    assert float((streamed - ordinary).norm() / ordinary.norm()) < 1e-12
    made.drop()


def test_distances_are_those_of_the_definitions() -> None:
    """Relative error, largest difference and KL by NumPy over rows; a shift of all logits is no KL."""
    random = torch.Generator().manual_seed(1)
    exact = torch.randn(3, 11, dtype=torch.float64, generator=random)
    ours = exact + 0.3 * torch.randn(3, 11, dtype=torch.float64, generator=random)
    ours[2] = exact[2] + 5
    found = compared(ours, exact)
    for t in range(3):
        a, b = ours[t].numpy(), exact[t].numpy()
        p = np.exp(log_softmax(b))
        assert found.relative[t] == pytest.approx(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()))
        assert found.largest[t] == pytest.approx(np.abs(a - b).max())
        assert found.kl_nats[t] == pytest.approx((p * (log_softmax(b) - log_softmax(a))).sum(), abs=1e-12)
        assert found.same_token[t] == (a.argmax() == b.argmax())
    assert found.kl_nats[2] == pytest.approx(0, abs=1e-12)
    assert found.relative[2] > 1
    told = found.cells()
    assert told[0].endswith(f"({max(found.relative):.3g})")
    assert told[3] == f"{sum(found.same_token)}/3"


def test_the_oracle_has_no_error_and_bf16_has_its_own() -> None:
    """Along the tokens of the first; bf16 is apart by its roundings, float64 by none that matter."""
    made = casts()
    exact, rounded = (engine(name, made) for name in ("oracle", "bf16_engine"))
    found = logit_errors(exact, {"bf16_engine": rounded}, prompt(9), 5)
    along = [f"{name}, {OWN_EXPERTS}" for name in found if OWN_EXPERTS not in name]
    assert list(found) == ["oracle", along[0], "bf16_engine", along[1]]
    assert max(found[along[0]].relative) < 1e-12
    assert max(found["oracle"].relative) < 1e-12
    assert found["oracle"].same_token == [True] * 5
    assert all(1e-4 < x < 0.2 for x in found["bf16_engine"].relative)
    alone = logit_errors(rounded, {}, prompt(9), 5)["bf16_engine"]
    assert alone.relative[0] == found["bf16_engine"].relative[0]  # before their tokens part


def test_exchanged_experts_are_not_the_variants_error() -> None:
    """Experts that a variant takes otherwise than float64 does are taken by float64 too: its rounding is left."""
    made = casts()
    engine_ = engine("oracle", made)
    right = engine_.build

    def swapping(*, probe: Probe | None = None, **more: Any) -> Model:
        """At layer 1, token 3, experts 0 and 1, whatever the scores are."""
        return right(probe=chain([Forcing({(1, 3): [0, 1]}), probe or NoProbe()]), **more)

    engine_.build = swapping
    found = logit_errors(engine_, {}, prompt(9), 4)
    assert min(found["oracle"].relative) > 1e-6
    assert max(found[f"oracle, {OWN_EXPERTS}"].relative) < 1e-12


def test_semantics_are_the_variants_own() -> None:
    """A variant that declares another eps is held against float64 with that eps: no error is left."""
    made = casts()
    variant = named_variant("oracle+norm.kv_eps=eps_1e6")
    declared = LocalEngine(made, variant, name="declared")
    assert declared.recipe.semantics != Semantics()
    found = logit_errors(declared, {"oracle": engine("oracle", made)}, prompt(9), 3)
    assert max(found["declared"].relative + found["oracle"].relative) < 1e-12


def test_a_logit_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of who made it."""
    made = casts()
    monkeypatch.setattr(decode, "steps", lambda *_: [decode.Run(torch.full((1, ODD.vocab_size), math.nan), 0, 0)])
    with pytest.raises(EngineError, match="bf16_engine: a logit is not finite"):
        logit_errors(engine("bf16_engine", made), {}, prompt(4), 1)


def test_nothing_runs_in_float64_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """oracle_tokens=0 is the default."""
    from experiments.bench import Settings

    assert _beside_float64(Settings(), None) == {}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "words",
    [
        ["oracle_tokens=4"],
        ["against=floors", "variant=paged_engine", "oracle_tokens=4"],
        ["against=floors", "variant=fast_decode", "oracle_tokens=-1"],
    ],
)
def test_only_a_fused_step_is_held_against_float64(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["bench", *words]) == 2
    assert "expected 0 or more, with device=cuda against=floors and a fused" in capsys.readouterr().err

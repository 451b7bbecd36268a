"""The model's definition in NumPy, and the oracle held against it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.definition import delta_rule, forward
from harness.forced_errors import Battery
from harness.shared_code import LARGEST_BYTES, TOLERANCE, SecondOpinion, second_opinion
from tests import tiny
from variants import layers, mlp_layers, model_config
from variants.axes import Execution, ExecutionAxes, KdaCore
from variants.batch import Batch
from variants.model_config import ModelConfig
from variants.ops import kda, mla, moe, norm
from variants.recipe import resolve
from variants.state import State

PAGE = 64
BATTERY = Battery(
    prompts=[tiny.prompt(5), tiny.prompt(11)], continuations=[tiny.prompt(6, seed=8), tiny.prompt(6, seed=9)]
)


def asked(config: ModelConfig = tiny.ODD, **more: object) -> SecondOpinion:
    made = tiny.casts(config)
    return second_opinion(made, resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, **more), config), BATTERY)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("config", [tiny.ODD, tiny.SMALL, replace(tiny.ODD, tie_word_embeddings=True)])
@pytest.mark.parametrize("execution", [tiny.INCREMENTAL, tiny.RECOMPUTE])
def test_the_oracle_computes_the_definition(config: ModelConfig, execution: tiny.ExecutionAxes) -> None:
    """In float64 both are the same to the order of sums, at every value that both name, in either execution."""
    found = asked(config, execution=execution)
    assert found.departs is None
    assert found.compared > 200
    assert 0 < found.largest < 1e-11


def test_every_place_of_the_definition_is_passed_by_the_oracle() -> None:
    """A name that no run passes would compare nothing: each is seen at every layer that has it."""
    made = tiny.casts()
    told = forward(tiny.ODD, lambda n: made.checkpoint.tensors[n].double().numpy(), tiny.prompt(7))
    seen: set[tuple[str, int]] = set()

    class Watch:
        def begin(self, step: object) -> None: ...

        def bind(self, site: str, layer: int, rule: object, rounding: Callable | None) -> Callable | None:
            seen.add((site, layer))
            return rounding

    tiny.build(tiny.oracle(), made, probe=Watch())  # pyright: ignore[reportArgumentType]
    assert set(told) <= seen


def _scaled(function: Callable) -> Callable:
    return lambda *a, **k: function(*a, **k) * 1.001


def _delta_without_decay(q, k, v, g, beta, state, **_):
    return kda.recurrent(q, k, v, g * 0.999, beta, state)


def _keeps_newest(window: torch.Tensor, lengths: list[int], keep: int) -> torch.Tensor:
    return window[:, -keep:].roll(1, 1)


ADD = layers.Residual.__call__


def _less(self: layers.Residual, h: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ADD(self, h, 0.999 * block)


MUTANTS = {
    "l2 norm": (lambda m: m.setitem(kda.L2NORM, "l2norm", lambda x, eps: kda.l2norm(x, eps=2 * eps)), "q_l2norm", 0),
    "decay": (lambda m: m.setitem(kda.GATES, "softplus", _scaled(kda.decay_gate)), "decay_gate", 0),
    "delta rule": (lambda m: m.setitem(kda.CORES, "recurrent", _delta_without_decay), "kda_core", 0),
    "carried taps": (lambda m: m.setattr(layers, "next_state", _keeps_newest), "short_conv", 0),
    "softmax scale": (lambda m: m.setattr(model_config.ModelConfig, "mla_scale", 7**-0.5), "mla_core", 1),
    "causality": (lambda m: m.setitem(mla.CORES, "dense_f32", _sees_ahead), "mla_core", 1),
    "weights": (lambda m: m.setitem(moe.WEIGHTS, "scale_after", _scaled(moe.weights_after)), "router_weights", 1),
    "choice": (lambda m: m.setattr(moe, "top_k_lowest_id", lambda c, k: c.sort(-1).indices[:, :k]), "router_ids", 1),
    "experts' sum": (lambda m: m.setitem(moe.SUM, "sum_loop", lambda y, *_: y.sum(1) - 0.001 * y[:, 0]), "routed", 1),
    "norm": (lambda m: m.setattr(layers, "norm_of", lambda name: _scaled(norm.rms_norm)), "input_norm", 0),
    "gated norm": (lambda m: m.setitem(norm.GATED, "sigmoid", _scaled(norm.gated_rms_norm)), "o_norm", 0),
    "residual": (lambda m: m.setattr(layers.Residual, "__call__", _less), "attn_residual", 0),
    "activation": (lambda m: m.setattr(mlp_layers.Swiglu, "_activate", lambda _, g, u: g * u), "mlp_down", 0),
    "stale slot": (lambda m: m.setattr(State, "reset", lambda s, slots: s.recurrent[0].add_(0.01)), "kda_core", 0),
}  # fmt: skip


def _sees_ahead(q, k, v, positions, **more):
    return mla.dense(q, k, v, positions + 1, **more)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_shared_code_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes the oracle as well as every variant, the definition stays: the first place that departs is told."""
    plant, site, layer = MUTANTS[name]
    plant(monkeypatch)
    found = asked()
    assert found.departs is not None
    assert found.departs[0] == (site, layer)
    assert found.departs[1] > TOLERANCE
    (finding,) = found.findings()
    assert (finding.site, finding.layer) == (site, layer)
    assert "departs" in finding.reason


def test_a_fault_that_begins_on_the_second_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt of the battery fills a page; the first page read in the second's place is found all the same."""
    right = layers.carried_keys

    def first_again(store: torch.Tensor, batch: Batch) -> torch.Tensor:
        carried = right(store, batch).clone()
        beyond = carried[:, PAGE:]
        carried[:, PAGE:] = carried[:, : beyond.shape[1]]
        return carried

    paged = ExecutionAxes(mode=Execution.paged, block_size=PAGE)
    assert asked(execution=paged).departs is None
    monkeypatch.setattr(layers, "carried_keys", first_again)
    found = asked(execution=paged)
    assert found.departs is not None
    assert found.departs[0] == ("mla_core", 1)


def test_a_fault_at_the_last_position_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that hides the first key from the last token of the longest sequence alone; a longer answer than is
    decoded here is prefilled in part."""
    long = replace(BATTERY, continuations=[tiny.prompt(24, seed=8), tiny.prompt(24, seed=9)])
    recipe = resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32), tiny.ODD)
    assert second_opinion(tiny.casts(), recipe, long).departs is None
    right, last = mla.dense, 11 + 24 - 2  # the last token is chosen and never run

    def window(q, k, v, positions, **how):
        if int(positions.max()) < last:
            return right(q, k, v, positions, **how)
        return right(q, k[:, 1:], v[:, 1:], positions - 1, **how)

    monkeypatch.setitem(mla.CORES, "dense_f32", window)
    found = second_opinion(tiny.casts(), recipe, long)
    assert found.departs is not None
    assert found.departs[0] == ("mla_core", 1)


@pytest.mark.parametrize("mode", [Execution.incremental, Execution.paged])
def test_a_state_that_lands_in_another_slot_is_named(mode: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt alone cannot show it: the two also run as rows of one batch."""
    right = layers.put

    def swapped(store: dict[int, torch.Tensor], layer: int, batch: Batch, value: torch.Tensor) -> None:
        right(store, layer, batch, value.roll(1, 0))

    monkeypatch.setattr(layers, "put", swapped)
    found = asked(execution=ExecutionAxes(mode=mode))
    assert found.departs is not None
    assert found.departs[0] == ("short_conv", 0)


def test_prompts_of_unlike_answers_run_together() -> None:
    """One answer ends after a token: both run as far as the shorter goes, and nothing departs."""
    ended = replace(BATTERY, continuations=[[5], tiny.prompt(6)])
    recipe = resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32), tiny.ODD)
    assert second_opinion(tiny.casts(), recipe, ended).departs is None


def test_what_is_not_a_number_departs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN is infinitely far from the definition, never equal to it."""
    monkeypatch.setitem(kda.GATES, "softplus", lambda *a, **k: kda.decay_gate(*a, **k) * float("nan"))
    found = asked()
    assert found.departs == (("decay_gate", 0), float("inf"))


def test_a_model_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second opinion is left out with its reason, not passed in silence."""
    monkeypatch.setattr("harness.shared_code.LARGEST_BYTES", 100)
    found = asked()
    assert found.compared == 0
    assert "parameters" in (found.left_out or "")
    assert found.record()["left_out"] == found.left_out
    assert LARGEST_BYTES > 8 * 12e6


def test_the_delta_rule_by_hand() -> None:
    """Two tokens of one head with K = V = 1: o1 = q1 k1 b1 v1, and the second corrects the decayed first."""
    q, k, v = (np.array(x, float).reshape(2, 1, 1) for x in ([2, 3], [1, 0.5], [4, 5]))
    g, beta = np.log(np.array([0.5, 0.25])).reshape(2, 1, 1), np.array([[0.5], [1.0]])
    state = 1 * 0.5 * 4
    second = 0.25 * state + 0.5 * 1.0 * (5 - 0.5 * 0.25 * state)
    assert delta_rule(q, k, v, g, beta).flatten().tolist() == [2 * state, 3 * second]


def test_another_core_is_not_the_oracles() -> None:
    """A variant's own chunks do not enter: the oracle runs its recurrence whatever is declared."""
    assert asked(kda=KdaCore.chunk).departs is None

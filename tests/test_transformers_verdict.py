"""The live transformers library under the instruments: its two departures from the checkpoint, found and named.

Nothing here is compared with stored figures of the library: they move with the CPU and its threads.
"""

import importlib.util
from functools import cache

import pytest
from instruments import battery, shipped

from harness.compose import groups, named_variant
from harness.hypotheses import Subject, explain
from harness.inspect import Inspection, inspect_library
from harness.verdict import Finding, ladder_findings, replay_findings
from variants.model_config import LayerKind
from variants.recipe import Recipe, resolve

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is optional: pip install neartie[transformers]", allow_module_level=True)

from harness.engines.assets import checkpoint_folder
from harness.engines.transformers_engine import TransformersEngine

BATTERY = battery((0, 2), 3)


def kind(which: LayerKind) -> list[int]:
    return [n for n, k in enumerate(shipped().checkpoint.config.layer_kinds) if k is which]


@cache
def inspected(dtype: str, declared: str) -> Inspection:
    library = TransformersEngine.load(checkpoint_folder("kimi-linear-12m"), dtype=dtype)
    return inspect_library(library, shipped(), recipe(declared), BATTERY)


def recipe(name: str) -> Recipe:
    """What a name resolves to; a variant in kernels that are not here has a recipe all the same."""
    return resolve(named_variant(name), shipped().checkpoint.config)


def found(dtype: str, declared: str, rung: str = "as run") -> list[Finding]:
    inspection = inspected(dtype, declared)
    config = shipped().checkpoint.config
    return replay_findings(inspection.replays[rung], recipe=inspection.arms[rung].recipe, config=config, rung=rung)


def why(finding: Finding, dtype: str, declared: str) -> str | None:
    names = sorted(groups()["variant"], key=lambda n: n != "transformers_mirror")
    subject = Subject(casts=shipped(), arms=inspected(dtype, declared).arms, named={n: recipe(n) for n in names})
    return explain(finding, subject)


def layers(findings: list[Finding], site: str) -> list[int | None]:
    return [f.layer for f in findings if f.site == site]


def test_f32_differs_in_the_eps_of_the_latent_norm_and_in_nothing_else() -> None:
    """At f32 exactly kv_a_norm of every MLA layer is in excess, and no other place that the library shows."""
    findings = found("f32", "f32")
    assert {f.site for f in findings} == {"kv_a_norm"}
    assert layers(findings, "kv_a_norm") == kind(LayerKind.mla) == [3, 7]
    assert "f32" not in inspected("f32", "f32").arms  # it runs at f32 already: one arm
    assert not ladder_findings(inspected("f32", "f32").ladder)


def test_the_eps_is_named() -> None:
    """Both the eps that the library has and the config's stand in the explanation."""
    finding = found("f32", "f32")[0]
    assert why(finding, "f32", "f32") == "explained by eps 1e-06 where the config says 1e-05"


def test_bf16_upcast_after_load_shows_the_rounded_parameter() -> None:
    """At f32 with its own parameters the decay gate of every KDA layer is in excess, and the eps again; beta is not."""
    findings = found("bf16", "bf16_engine", "f32")
    assert {f.site for f in findings} == {"decay_gate", "kv_a_norm"}
    assert layers(findings, "decay_gate") == kind(LayerKind.kda)
    assert layers(findings, "kv_a_norm") == kind(LayerKind.mla)


def test_the_rounded_parameter_is_named() -> None:
    """Of A_log and dt_bias it is A_log that was rounded when it was loaded; the ladder's floor begins at layer 0."""
    finding = found("bf16", "bf16_engine", "f32")[0]
    assert why(finding, "bf16", "bf16_engine") == "explained by A_log rounded to bf16 when loaded"
    assert [f.layer for f in ladder_findings(inspected("bf16", "bf16_engine").ladder)] == [0]


def test_bf16_as_run_shows_betas_sigmoid() -> None:
    """beta's values fit bf16 in every KDA layer where f32 is declared, and that alone takes its excess away."""
    findings = [f for f in found("bf16", "bf16_engine") if f.site == "beta"]
    assert [f.layer for f in findings] == kind(LayerKind.kda)
    assert all("values fit bf16 where f32 is declared: an undeclared rounding" in f.reason for f in findings)
    assert why(findings[0], "bf16", "bf16_engine") == "explained by beta rounded to bf16 where f32 is declared"


def test_the_mirror_holds_every_rounding_point() -> None:
    """Held against transformers_mirror, nothing of the library's bf16 is in excess, as it runs and upcast."""
    assert not found("bf16", "transformers_mirror")
    assert not found("bf16", "transformers_mirror", "f32")
    assert not ladder_findings(inspected("bf16", "transformers_mirror").ladder)


def test_what_the_library_shows_is_most_of_the_forward() -> None:
    """Every layer is compared at its projections, gates, cores, norms and experts: a clean result is no empty one."""
    compared = inspected("f32", "f32").replays["as run"].compared
    for layer in kind(LayerKind.kda):
        assert {(s, layer) for s in ("q_proj", "decay_gate", "beta", "kda_core", "kda_state", "o_norm")} <= compared
    for layer in kind(LayerKind.mla):
        assert {(s, layer) for s in ("mla_q_proj", "kv_a_norm", "kv_b_proj", "mla_core", "combine")} <= compared


@pytest.mark.slow
@pytest.mark.parametrize(("declared", "said"), [(None, "DEFECT"), ("transformers_mirror", "ROUNDING")])
def test_the_command_judges_against_what_is_declared(
    declared: str | None, said: str, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Taken for a plain bf16 engine the library has a defect with its cause; declared as its mirror, rounding alone."""
    from experiments.cli import main

    words = [f"declared={declared}"] if declared else []
    argv = ["verdict", "engine=transformers", "engine.dtype=bf16", "limit=3", "max_tokens=6", f"results={tmp_path}"]
    assert main([*argv, *words]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"{said}  transformers_bf16_eager")
    assert declared or "explained by A_log rounded to bf16 when loaded" in line


def test_a_declared_variant_that_carries_no_state_is_refused(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library runs on a cache; a recompute variant cannot stand for it, and what would do is said."""
    from experiments.cli import main

    argv = ["verdict", "engine=transformers", "declared=f64_islands", "limit=1", "max_tokens=1", f"results={tmp_path}"]
    assert main(argv) == 2
    assert "declared=f64_islands: the library prefills a prompt in one piece" in capsys.readouterr().err

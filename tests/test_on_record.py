"""The recipes of named variants on record: what an edit of the rules shows, and what is left out."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import ODD

from experiments.cli import main
from harness import on_record as module
from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.on_record import MODEL, current, described, on_record, recorded
from variants.axes import Variant
from variants.checkpoint import load_config
from variants.dtypes import DType
from variants.recipe import Recipe, Semantics, resolve

Captured = pytest.CaptureFixture[str]
CONFIG = load_config(checkpoint_folder(MODEL))


def recipe(name: str) -> Recipe:
    return resolve(named_variant(name), CONFIG)


def with_rule(of: Recipe, key: str, **changes: Any) -> Recipe:
    return replace(of, rules={**of.rules, key: replace(of.rules[key], **changes)})


def test_the_record_is_of_the_code_as_it_is() -> None:
    """Whoever changes what a named variant means says so: python -m harness.on_record."""
    assert recorded() == current()


def test_a_recipe_as_recorded_is_no_finding() -> None:
    for name in ("f32", "vllm_compiled", "paged_native"):
        assert on_record(name, named_variant(name), CONFIG, recipe(name)) == module.OnRecord()


@pytest.mark.parametrize(
    ("name", "key", "changes", "words"),
    [
        ("f32", "kda_state", {"output": DType.bf16, "storage": DType.bf16}, "output bf16, on record keep"),
        ("bf16_stream", "input_norm", {"algorithm": "rms_norm_pre_store"}, "algorithm rms_norm_pre_store"),
        ("incremental_chunk", "kda_core.prefill", {"options": (("chunk_size", 32),)}, "options chunk_size=32"),
    ],
)
def test_rules_that_changed_under_the_same_axes(name: str, key: str, changes: dict[str, Any], words: str) -> None:
    """An edit of rules.py, which every other instrument would take for what is meant: site and format are named."""
    found = on_record(name, named_variant(name), CONFIG, with_rule(recipe(name), key, **changes)).findings()
    assert [f.site for f in found] == [key.partition(".")[0]]
    assert words in found[0].reason


def test_a_rule_at_one_layer_and_what_is_beside_the_sites() -> None:
    """An exception that is new, and a declared departure from the checkpoint's function."""
    plain = recipe("f32")
    odd = replace(plain, exceptions={("o_proj", 2): replace(plain.rules["o_proj"], output=DType.bf16)})
    (found,) = on_record("f32", named_variant("f32"), CONFIG, odd).findings()
    assert (found.site, found.layer) == ("o_proj", 2)
    (found,) = on_record(
        "f32", named_variant("f32"), CONFIG, replace(plain, semantics=Semantics(kv_eps=1e-6))
    ).findings()
    assert found.site is None
    assert "semantics" in found.reason


def test_what_is_not_on_record_is_left_out() -> None:
    """Another variant, axes that its YAML did not have then, another geometry: said, and no finding."""
    variant = named_variant("f32")
    changed = with_rule(recipe("f32"), "kda_state", storage=DType.bf16)
    for name, axes, config in (
        ("f32+kda.state=bf16", variant, CONFIG),
        ("f32", replace(variant, batch_invariant=True), CONFIG),
        ("f32", variant, ODD),
    ):
        told = on_record(name, axes, config, changed)
        assert told.findings() == []
        assert "on record" in str(told.left_out)


def test_a_default_that_changed_is_no_change_of_axes() -> None:
    """Axes are told by what a variant sets: a default that becomes another is found at the rules."""
    assert module.axes_of(Variant()) == module.axes_of(named_variant("f64_islands"))
    assert module.axes_of(named_variant("f32")) != module.axes_of(named_variant("f64_islands"))
    assert described(recipe("f32"))["rest"] == recorded()["variants"]["f32"]["rest"]


def test_a_verdict_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """From the command: a record that says otherwise is DEFECT, by the site's name."""
    other = deepcopy(recorded())
    site = other["keys"].index("o_norm")
    other["variants"]["f32"]["rules"][site] = other["variants"]["transformers_mirror"]["rules"][site]
    monkeypatch.setattr(module, "recorded", lambda: other)
    main(["verdict", "variant=f32", "limit=1", "max_tokens=2", "device.threads=1", f"results={tmp_path}"])
    assert "DEFECT  f32: o_norm: the axes of f32 mean another rule" in capsys.readouterr().out

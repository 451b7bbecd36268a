"""The calibration: what is stored, what it says of a recipe, and that it can be made again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from experiments import calibrate as command
from experiments.cli import main
from harness.calibration import (
    SHIPPED,
    Benign,
    Calibration,
    calibrate,
    family,
    load_calibration,
    of_recipe,
    shipped_calibration,
    write_calibration,
)
from harness.compose import groups, load, named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import shared_casts
from harness.envelope import envelope
from harness.forced_errors import Battery
from harness.golden import load_golden
from harness.significance import holm
from variants.axes import Gemm, NormAxes, NormVariance, Store, Stream
from variants.errors import InputError, UsageError
from variants.recipe import resolve

ODD = tiny.ODD
STORED = NormAxes(variance=NormVariance.stored)
BF16 = tiny.plain(Stream.bf16, Gemm.bf16, norm=STORED, logits=Store.bf16)


@pytest.fixture(scope="module")
def shipped() -> Calibration:
    return load_calibration(SHIPPED / "kimi_linear_12m.json")


def made(shifts: np.ndarray, noise: float = 0.0) -> Calibration:
    """A calibration of bf16 variants with these shifts [variants, places]."""
    rows = [
        Benign(variant=f"v{n}", family="bf16", recipe_hash=f"{n}", shift=tuple(row), noise=(noise,) * len(row))
        for n, row in enumerate(shifts.tolist())
    ]
    return Calibration(
        model_sha256="m", golden="g", golden_hash="h", positions=1, members=3, seed=0, torch="t",
        places=tuple(f"p{n}" for n in range(shifts.shape[1])), benign=tuple(rows),
    )  # fmt: skip


def test_a_calibration_reads_back_as_it_was_written(tmp_path: Path, shipped: Calibration) -> None:
    """Every number and the hash survive the file, which is strict JSON."""
    path = tmp_path / "c" / "again.json"
    write_calibration(shipped, path)
    assert load_calibration(path) == shipped
    assert json.loads(path.read_text())["hash"] == shipped.hash


@pytest.mark.parametrize("change", ["value", "missing", "text"])
def test_an_edited_file_is_refused(tmp_path: Path, shipped: Calibration, change: str) -> None:
    """A changed number, a missing field or something that is no JSON ends in one line that says what to do."""
    path = tmp_path / "c.json"
    write_calibration(shipped, path)
    row = json.loads(path.read_text())
    if change == "value":
        row["benign"][0]["shift"][0] += 1e-9
    elif change == "missing":
        del row["places"]
    path.write_text("{" if change == "text" else json.dumps(row))
    with pytest.raises(InputError, match="hash does not fit" if change == "value" else "not a calibration"):
        load_calibration(path)
    with pytest.raises(InputError, match="neartie calibrate"):
        load_calibration(tmp_path / "none.json")


def test_the_members_share_of_the_spread_is_taken_off() -> None:
    """Shifts with variance v of which members explain n leave v - n, and never less than nothing."""
    recipe = resolve(BF16, ODD)
    shifts = np.array([[0.1, 0.0], [0.3, 0.0], [0.5, 0.0]])
    found = made(shifts, noise=0.01).model(recipe)
    assert found.mean == pytest.approx([0.3, 0.0])
    assert found.variance == pytest.approx([0.03, 0.0])
    assert made(shifts).model(recipe).variance == pytest.approx([0.04, 0.0])


def test_a_variant_that_is_judged_takes_no_part() -> None:
    """The row of the recipe itself is left out; with fewer than three others there is no model of correct code."""
    recipe = resolve(BF16, ODD)
    base = made(np.array([[0.1], [0.2], [0.3], [9.0]]))
    own = replace(base, benign=(*base.benign[:3], replace(base.benign[3], recipe_hash=recipe.hash)))
    assert own.model(recipe).mean == pytest.approx([0.2])
    assert own.model(recipe).count == 3
    with pytest.raises(UsageError, match="2 benign variants of bf16"):
        replace(own, benign=own.benign[1:]).model(recipe)
    with pytest.raises(UsageError, match="0 benign variants of f32"):
        own.model(resolve(tiny.plain(Stream.f32, Gemm.f32), ODD))


def test_a_family_is_the_coarsest_format() -> None:
    """One bf16 site makes a recipe bf16, whatever the others are."""
    assert family(resolve(tiny.oracle(), ODD)) == "f64"
    assert family(resolve(tiny.plain(Stream.f32, Gemm.f32), ODD)) == "f32"
    assert family(resolve(tiny.plain(Stream.f32, Gemm.f16), ODD)) == "f16"
    assert family(resolve(tiny.plain(Stream.f32, Gemm.bf16_f32out), ODD)) == "bf16"


def test_calibrating_twice_gives_the_same_hash_and_another_seed_another() -> None:
    """What is stored is a function of checkpoint, battery, variants and seed alone; 0 is a seed."""
    casts = tiny.casts()
    battery = Battery(prompts=[tiny.prompt(4), tiny.prompt(6)], continuations=[[5, 6, 7], [8, 9, 10]])
    variants = {"a": BF16, "b": replace(BF16, logits=Store.f32)}
    named = {"golden": "g", "golden_hash": "h"}
    made_ = [calibrate(casts, variants, battery, members=3, seed=s, named=named) for s in (0, 0, 1)]
    assert made_[0].hash == made_[1].hash != made_[2].hash
    assert made_[0].places == ("mlp_residual@0", "mlp_residual@1", "mlp_residual@2", "lm_head@3", "logprobs")
    assert made_[0].positions == 6
    assert [b.variant for b in made_[0].benign] == ["a", "b"]


def test_the_shipped_calibration_is_of_the_shipped_checkpoint_and_battery(shipped: Calibration) -> None:
    """Its checkpoint, golden and variants are those that the command runs by default; every family has five or more."""
    from harness.gate import part_of

    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    assert shipped_calibration(casts.checkpoint.sha256) == shipped
    settings = load([], root=command.Settings)
    golden = part_of(load_golden(settings.golden), prompts=settings.limit, tokens=settings.max_tokens)
    assert (shipped.golden_hash, shipped.members, shipped.seed) == (golden.hash, settings.members, settings.seed)
    assert [b.variant for b in shipped.benign] == [words for group in command.BENIGN.values() for words in group]
    assert all(sum(b.family == name for b in shipped.benign) >= 5 for name in ("bf16", "f16", "f32"))
    assert all(abs(x) < 0.5 for b in shipped.benign for x in b.shift)
    with pytest.raises(InputError, match="no calibration of checkpoint"):
        shipped_calibration("0" * 64)


def test_no_named_variant_was_calibrated_on(shipped: Calibration) -> None:
    """What a user judges under a name did not take part in fixing what is normal."""
    config = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu").checkpoint.config
    named = {resolve(named_variant(name), config).hash for name in groups()["variant"]}
    assert not named & {b.recipe_hash for b in shipped.benign}


@pytest.mark.parametrize("name", ["bf16_stream", "f32"])
def test_a_named_correct_variant_is_not_called_out(name: str, shipped: Calibration) -> None:
    """On other prompts than those calibrated on, no place and no logprob of a correct variant has a corrected p < 1 %.

    With its errors as if doubled, some place has.
    """
    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    recipe = resolve(named_variant(name), casts.checkpoint.config)
    battery = Battery.of(load_golden("gate")).part(range(3), 6)
    found = envelope(recipe, casts, battery, members=5, seed=3, candidates={"c": of_recipe(recipe, casts)})
    model = shipped.model(recipe)
    places = replace(model, mean=model.mean[:-1], variance=model.variance[:-1], df=model.df[:-1])
    errors = found.table.parties["c"].rms[0]
    assert holm(found.p_values(errors, places)).min() > 0.01
    assert holm(found.p_values(4 * errors, places)).min() < 0.01


def test_the_command_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """`neartie calibrate` with two variants and a short battery stores them under out=, twice the same."""
    monkeypatch.setattr(command, "BENIGN", {"bf16": ("bf16_stream logits=bf16", "bf16_stream kda.chunk_size=32")})
    out = tmp_path / "c.json"
    words = ["calibrate", f"out={out}", "limit=2", "max_tokens=2", "members=3", "device.threads=1"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert "2 benign variants, 4 positions" in head
    assert head.endswith(", the same")
    assert load_calibration(out).members == 3


def test_the_command_refuses_two_members(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer than three members have no spread worth storing: exit 2."""
    assert main(["calibrate", "members=2"]) == 2
    assert "members=2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_stored_calibration_can_be_made_again(shipped: Calibration, tmp_path: Path) -> None:
    """On whatever CPU, each shift is within 0.15 of what is stored; on the one that made it, the hash is the same."""
    out = tmp_path / "again.json"
    assert main(["calibrate", f"out={out}", "device.threads=1"]) == 0
    again = load_calibration(out)
    for stored, found in zip(shipped.benign, again.benign, strict=True):
        assert np.abs(np.array(stored.shift) - np.array(found.shift)).max() < 0.15

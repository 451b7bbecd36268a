"""The calibration: what is stored, what it says of a recipe, and that it can be made again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from scipy import stats

from experiments import calibrate as command
from experiments.cli import main
from harness.benign_null import outside
from harness.calibration import (
    ENVELOPE_P,
    SHIPPED,
    Benign,
    Calibration,
    calibrate,
    family,
    find_calibration,
    load_calibration,
    measured,
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
from variants.axes import Gemm, NormAxes, NormVariance, Store, Stream
from variants.errors import InputError, UsageError
from variants.recipe import resolve

ODD = tiny.ODD
STORED = NormAxes(variance=NormVariance.stored)
BF16 = tiny.plain(Stream.bf16, Gemm.bf16, norm=STORED, logits=Store.bf16)


@pytest.fixture(scope="module")
def shipped() -> Calibration:
    return load_calibration(SHIPPED / "kimi_linear_12m.json")


def made(shifts: np.ndarray) -> Calibration:
    """A calibration of bf16 variants with these shifts [variants, lengths, prompts, places] in hundredths, of 1 and 4
    tokens."""
    rows = [
        Benign(variant=f"v{n}", family="bf16", recipe_hash=f"{n}", shifts=tuple(tuple(map(tuple, x)) for x in row))
        for n, row in enumerate(shifts.tolist())
    ]
    return Calibration(
        model_sha256="m", golden="g", golden_hash="h", lengths=(1, 4), members=3, seed=0, torch="t",
        places=tuple(f"p{n}" for n in range(shifts.shape[-1])), benign=tuple(rows),
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
        row["benign"][0]["shifts"][0][0][0] += 1
    elif change == "missing":
        del row["places"]
    path.write_text("{" if change == "text" else json.dumps(row))
    with pytest.raises(InputError, match="hash does not fit" if change == "value" else "not a calibration"):
        load_calibration(path)
    with pytest.raises(InputError, match="neartie calibrate"):
        load_calibration(tmp_path / "none.json")


def test_a_variant_that_is_judged_takes_no_part() -> None:
    """The row of the recipe itself is left out; with fewer than three others nothing says what correct code shows."""
    recipe = resolve(BF16, ODD)
    base = made(np.arange(4 * 2 * 3 * 2).reshape(4, 2, 3, 2))
    own = replace(base, benign=(*base.benign[:3], replace(base.benign[3], recipe_hash=recipe.hash)))
    assert own.correct(recipe, 4).shape == (3, 3, 2)
    with pytest.raises(UsageError, match="2 benign variants of bf16"):
        replace(own, benign=own.benign[1:]).correct(recipe, 4)
    with pytest.raises(UsageError, match="0 benign variants of f32"):
        own.correct(resolve(tiny.plain(Stream.f32, Gemm.f32), ODD), 4)


def test_shifts_are_those_of_a_length_that_the_battery_has() -> None:
    """Up to three tokens are held against shifts over one, four and more against those over four; in ln, not 1/100."""
    shifts = np.zeros((3, 2, 2, 1), dtype=int)
    shifts[:, 1] = 50
    recipe, found = resolve(BF16, ODD), made(shifts)
    assert [float(found.correct(recipe, tokens).max()) for tokens in (1, 3, 4, 60)] == [0.0, 0.0, 0.5, 0.5]


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
    shared = {"battery": battery, "members": 3, "named": named, "model_sha256": casts.checkpoint.sha256}

    def made_with(seed: int) -> Calibration:
        each = (measured(name, v, casts, battery, members=3, seed=seed) for name, v in variants.items())
        return calibrate(each, seed=seed, **shared)

    made_ = [made_with(seed) for seed in (0, 0, 1)]
    assert made_[0].hash == made_[1].hash != made_[2].hash
    assert made_[0].places == ("mlp_residual@0", "mlp_residual@1", "mlp_residual@2", "lm_head@3", "logprobs")
    assert made_[0].lengths == (1, 3)
    assert np.shape(made_[0].benign[0].shifts) == (2, 2, 5)
    assert [b.variant for b in made_[0].benign] == ["a", "b"]


def test_the_shipped_calibration_is_of_the_shipped_checkpoint_and_battery(shipped: Calibration) -> None:
    """Its checkpoint, golden and variants are those that the command runs by default; each family has ten."""
    from harness.gate import part_of

    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    assert shipped_calibration(casts.checkpoint.sha256) == shipped
    settings = load([], root=command.Settings)
    golden = part_of(load_golden(settings.golden), prompts=settings.limit, tokens=settings.max_tokens)
    assert (shipped.golden_hash, shipped.members, shipped.seed) == (golden.hash, settings.members, settings.seed)
    assert [b.variant for b in shipped.benign] == [words for group in command.BENIGN.values() for words in group]
    assert all(sum(b.family == name for b in shipped.benign) >= 10 for name in ("bf16", "f16", "f32"))
    assert all(np.abs(np.mean(b.shifts[-1], 0)).max() < 50 for b in shipped.benign)
    with pytest.raises(InputError, match="no calibration of checkpoint"):
        shipped_calibration("0" * 64)


def test_no_named_variant_was_calibrated_on(shipped: Calibration) -> None:
    """What a user judges under a name did not take part in fixing what is normal."""
    config = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu").checkpoint.config
    named = {resolve(named_variant(name), config).hash for name in groups()["variant"]}
    assert not named & {b.recipe_hash for b in shipped.benign}


@pytest.mark.parametrize("name", ["bf16_stream", "f32"])
def test_a_named_correct_variant_is_not_called_out(name: str, shipped: Calibration) -> None:
    """On other prompts than those calibrated on, no place and no logprob of a correct variant alarms.

    With its errors four times as large both do. Fewer members than the calibration's are refused.
    """
    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    recipe = resolve(named_variant(name), casts.checkpoint.config)
    battery = Battery.of(load_golden("gate")).part(range(3), 4)
    found = envelope(recipe, casts, battery, members=8, seed=3, candidates={"c": of_recipe(recipe, casts)})
    mine = found.table.parties["c"]
    assert shipped.judge(recipe, found, mine.rms[0]).p.min() > ENVELOPE_P
    assert shipped.judge(recipe, found, 4 * mine.rms[0]).p.min() < ENVELOPE_P
    assert shipped.judge_logprobs(recipe, found, mine.deviations[0]).p.min() > ENVELOPE_P
    assert shipped.judge_logprobs(recipe, found, 4 * mine.deviations[0]).p.min() < ENVELOPE_P
    with pytest.raises(UsageError, match="made with 8 members, got 7"):
        shipped.judge(recipe, replace(found, errors=found.errors[1:]), mine.rms[0])


@pytest.mark.parametrize(("prompts", "length"), [(1, 1), (1, 4), (2, 4), (4, 1), (8, 4)])
def test_p_values_are_uniform_for_correct_runs_at_any_size(prompts: int, length: int, shipped: Calibration) -> None:
    """Each calibrated variant, held against the others of its family on batteries of its own prompts.

    Real runs on the shipped checkpoint, from 1 position to 32: p under 5 % in no more runs than chance gives, and under
    ENVELOPE_P in no more than the 1 % that it promises (binomial, 1 %; eight batteries of a variant count as two, for
    they share its roundings).
    """
    random, p = np.random.default_rng(0), []
    at = shipped.lengths.index(length)
    for one in shipped.benign:
        others = [b.shifts[at] for b in shipped.benign if b.family == one.family and b is not one]
        correct, mine = np.array(others)[..., :-1] / 100, np.array(one.shifts[at])[:, :-1] / 100
        for n in range(8):
            rows = random.choice(len(mine), prompts, replace=False)
            p.append(outside(mine[rows], correct, draws=1000, seed=n).p.min())
    found = np.array(p)
    few = 2 * len(shipped.benign)
    for level, share in ((0.05, 0.05), (ENVELOPE_P, 0.01)):
        hits = round((found < level).mean() * few)
        assert stats.binomtest(hits, few, share, alternative="greater").pvalue > 0.01
    assert 0.3 < np.median(found) < 0.7


def test_the_command_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """`neartie calibrate` with two variants and a short battery stores them under out=, the same from two processes."""
    monkeypatch.setattr(command, "BENIGN", {"bf16": ("bf16_stream logits=bf16", "bf16_stream kda.chunk_size=32")})
    out = tmp_path / "c.json"
    words = ["calibrate", f"out={out}", "limit=2", "max_tokens=2", "members=3", "device.threads=1"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "workers=2"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert "2 benign variants, 2 prompts x 2 tokens" in head
    assert head.endswith(", the same")
    assert load_calibration(out).members == 3


def test_the_command_refuses_two_members(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer than three members have no spread worth storing: exit 2."""
    assert main(["calibrate", "members=2"]) == 2
    assert "members=2" in capsys.readouterr().err


def test_a_damaged_calibration_is_no_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without a calibration has None; a stored file that was edited stops the run instead."""
    monkeypatch.setattr("harness.calibration.SHIPPED", tmp_path)
    assert find_calibration("m") is None
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(InputError, match="not a calibration"):
        find_calibration("m")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_stored_calibration_can_be_made_again(shipped: Calibration, tmp_path: Path) -> None:
    """On whatever CPU a variant's mean shift is within 0.15 of the stored; where it was made, the hash is the same."""
    out = tmp_path / "again.json"
    assert main(["calibrate", f"out={out}", "device.threads=1"]) == 0
    again = load_calibration(out)
    for stored, found in zip(shipped.benign, again.benign, strict=True):
        a, b = (np.array(x.shifts[-1]).mean(0) / 100 for x in (stored, found))
        assert np.abs(a - b).max() < 0.15

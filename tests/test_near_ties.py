"""Near-ties: listed by gap, from an oracle or from what a golden recorded, held against a noise, drawn, exported."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.cli import main
from harness import plots
from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.gate import part_of
from harness.golden import Golden, load_golden, write_golden
from harness.near_ties import Gaps, oracle_gaps, recorded_gaps
from harness.noise_scale import Gaussian, Measured, measure
from harness.oracle import Forced, Oracle, consult
from variants.errors import InputError, UsageError

Captured = pytest.CaptureFixture[str]
PART = ["limit=2", "max_tokens=4"]


def small_golden() -> Golden:
    """Two prompts of three places; the second row ends after one. The golden token of (0, 2) is on no list."""
    logprobs = np.array([[[-0.5, -0.5, -3], [-0.1, -2.6, -4], [-0.2, -1.7, -9]], [[-0.3, -1.5, -8]] * 3])
    ids = np.array([[[4, 5, 6], [7, 8, 9], [1, 2, 3]], [[10, 11, 12]] * 3], np.int32)
    return Golden(
        name="small",
        prompts=((1, 2), (3,)),
        tokens=np.array([[[4, 8, 99], [10, -1, -1]]], np.int32),
        top_ids=ids,
        top_logprobs=logprobs,
    )


@pytest.fixture(scope="module")
def gate() -> Golden:
    return part_of(load_golden("gate"), prompts=2, tokens=8)


@pytest.fixture(scope="module")
def oracle(gate: Golden) -> Oracle:
    return consult(shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu").checkpoint, Forced.of(gate))


def test_recorded_gaps_are_read_off_the_list() -> None:
    """Smallest gap first, ties of exactly zero among them; ranks and leads of the golden token; none past an end."""
    gaps = recorded_gaps(small_golden())
    places = gaps.nearest()
    assert [(p.prompt, p.position) for p in places] == [(0, 0), (1, 0), (0, 2), (0, 1)]
    assert [p.rank for p in places] == [1, 1, None, 2]
    assert [p.lead_nats for p in places] == [0.0, pytest.approx(1.2), None, pytest.approx(-2.5)]
    assert places[3].gap_nats == pytest.approx(2.5)
    assert (places[3].golden_id, places[3].first_id, places[3].second_id) == (8, 7, 8)
    assert (gaps.places, gaps.not_first, gaps.under(1.3)) == (4, 1, 2)
    assert gaps.nearest(1) == places[:1]


def test_recorded_gaps_need_logprobs() -> None:
    """A golden of tokens alone has no recorded gaps, and the message says what to do."""
    bare = replace(small_golden(), top_ids=None, top_logprobs=None)
    with pytest.raises(InputError, match="recorded no logprobs; leave --recorded out"):
        recorded_gaps(bare)


def test_oracle_gaps_are_the_oracles(gate: Golden, oracle: Oracle) -> None:
    """Order, tokens, rank and lead come from float64; the golden's own gap stands beside them."""
    gaps = oracle_gaps(gate, oracle)
    places = gaps.nearest(text=lambda token: f"<{token}>")
    assert [p.gap_nats for p in places] == sorted(oracle.gaps.ravel().tolist())
    nearest = places[0]
    at = (nearest.prompt, nearest.position)
    assert (nearest.prompt, nearest.position, nearest.rank) == (0, 7, 2)
    assert nearest.lead_nats == -nearest.gap_nats == oracle.margin(at, nearest.second_id, nearest.first_id)
    assert nearest.golden_gap_nats == pytest.approx(0.0625, abs=1e-6)  # float32 logprobs of bf16 logits
    assert (nearest.golden_text, nearest.first_text) == (f"<{nearest.golden_id}>", f"<{nearest.first_id}>")


def test_oracle_of_other_tokens_is_refused(gate: Golden, oracle: Oracle) -> None:
    """An oracle that was asked about other tokens judges nothing here."""
    with pytest.raises(InputError, match="asked about other prompts or tokens"):
        oracle_gaps(part_of(load_golden("gate"), prompts=2, tokens=7), oracle)


def test_gaussian_flips() -> None:
    """A lead of one standard deviation turns in 15.87 %, one of nothing in half; noise of zero turns by sign alone."""
    leads = np.array([0.02, -0.02, 0.0, np.nan])
    assert Gaussian(0.02).flips(leads)[:3] == pytest.approx([0.158655, 0.841345, 0.5], abs=1e-6)
    assert Gaussian(0.0).flips(leads)[:3].tolist() == [0.0, 1.0, 0.5]
    assert np.isnan(Gaussian(0.02).flips(leads)[3])
    assert np.isnan(Gaussian(0.0).flips(leads)[3])
    with pytest.raises(UsageError, match="-1"):
        Gaussian(-1.0)


def test_measured_flips_count_errors() -> None:
    """The share of errors, of either sign, that take a lead below zero; an error as large as the lead counts half."""
    errors = np.array([[0.1, -0.3], [np.nan, 0.2]])
    noise = Measured.of(errors)
    both = np.concatenate([noise.magnitudes, -noise.magnitudes])
    leads = np.array([0.05, 0.15, 0.2, 0.25, 0.4, -0.15, -0.4])
    counted = [np.mean((lead + both < 0) + 0.5 * (lead + both == 0)) for lead in leads]
    assert noise.flips(leads).tolist() == pytest.approx(counted)
    assert noise.flips(np.array([0.0]))[0] == 0.5
    with pytest.raises(UsageError, match="no place"):
        Measured.of(np.array([np.nan]))


def test_measured_scale_is_a_standard_deviation_of_normal_errors() -> None:
    """Of normal errors the half-width of 68 % and the rms are both their standard deviation."""
    noise = Measured.of(np.random.default_rng(1).normal(0, 0.03, 200_000))
    assert noise.scale_nats == pytest.approx(0.03, rel=0.01)  # sampling error of 2e5 draws: 0.3 %
    assert noise.rms_nats == pytest.approx(0.03, rel=0.01)


def engine(variant: str) -> LocalEngine:
    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    return LocalEngine(casts, named_variant(variant), name=variant)


def test_noise_follows_the_variants_precision(oracle: Oracle) -> None:
    """Measured noise: none for the oracle itself, float32's for f32, far more for bf16."""
    assert measure(engine("oracle"), oracle).magnitudes.max() < 1e-10
    assert 1e-8 < measure(engine("f32"), oracle).scale_nats < 1e-4
    assert 1e-3 < measure(engine("incremental_chunk"), oracle).scale_nats < 1e-1


def test_one_pass_measures_what_recomputing_gives(oracle: Oracle) -> None:
    """The errors of a recomputing variant, taken in one pass, are those of recomputing each prefix.

    Of a declared departure, in float64: how float32 rounds follows the processor and the shape of a batch.
    """
    variant = engine("oracle+execution.mode=recompute+norm.kv_eps=eps_1e6")
    tokens = oracle.forced.continuations
    scored = variant.score(oracle.forced.prompts, tokens, top_k=2)
    rivals = np.where(scored.top_ids[..., 0] == oracle.forced.tokens, *np.moveaxis(scored.top_logprobs, -1, 0)[::-1])
    errors = scored.token_logprobs - rivals - oracle.leads
    assert measure(variant, oracle).magnitudes == pytest.approx(np.sort(np.abs(errors.ravel())), rel=0, abs=1e-12)


def test_histogram_counts_every_gap() -> None:
    """Each gap above zero is in a bar, exact ties are named, and the noise stands where it is."""
    axes = Figure().subplots()
    plots._histogram(axes, recorded_gaps(small_golden()), 0.7)
    assert sum(bar.get_height() for bar in axes.patches) == 3  # pyright: ignore[reportAttributeAccessIssue]
    legend = [t.get_text() for t in axes.get_legend().get_texts()]  # pyright: ignore[reportOptionalMemberAccess]
    assert legend == [
        "reference engine, 4 places",
        "noise 0.7 nat, 1 places under it",
        "and 1 exact ties, off this scale",
    ]
    assert axes.lines[0].get_xdata()[0] == 0.7  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("noise", [None, 1e-6, 50.0])
def test_figure_is_drawn_whatever_the_scale(tmp_path: Path, noise: float | None) -> None:
    """A PNG is written with and without noise, with noise outside the gaps, and for a golden of nothing but ties."""
    tied = replace(small_golden(), top_logprobs=np.full((2, 3, 3), -1.5))
    for golden in (small_golden(), tied):
        path = plots.plot_near_ties(recorded_gaps(golden), tmp_path / "new" / "a.png", noise_nats=noise)
        assert path.read_bytes().startswith(b"\x89PNG")


def run(argv: list[str], tmp_path: Path) -> int:
    return main(["near-ties", *argv, f"results={tmp_path}"])


def test_command_writes_list_table_and_figure(tmp_path: Path, capsys: Captured) -> None:
    """--json holds the smallest gaps in order, the CSV every place, the figure is where the document says."""
    table = tmp_path / "all.csv"
    assert run([*PART, "top=3", "--noise=0.5", "--json", f"--csv={table}"], tmp_path) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["source"], document["places"], document["noise_nats"]) == ("oracle", 8, 0.5)
    listed = [p["gap_nats"] for p in document["near_ties"]]
    assert len(listed) == 3
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    gaps = [float(row["gap_nats"]) for row in rows]
    assert len(gaps) == 8
    assert gaps == sorted(gaps)
    assert gaps[:3] == listed
    assert document["under_noise"] == sum(g < 0.5 for g in gaps)
    assert Path(document["figure"]).read_bytes().startswith(b"\x89PNG")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".oracle"]


def test_command_measures_a_variants_noise(tmp_path: Path, capsys: Captured) -> None:
    """--noise=measured runs the variant and says what it saw."""
    assert run([*PART, "variant=incremental_chunk", "--noise=measured"], tmp_path) == 0
    assert "noise of incremental_chunk, one run: rms" in capsys.readouterr().out


def test_command_without_the_model(tmp_path: Path, capsys: Captured) -> None:
    """--recorded reads no model, not even where there is none, and says that no oracle was asked."""
    path = write_golden(small_golden(), tmp_path / "small.json").path
    assert run([f"golden={path}", "--recorded", "model=folder", "model.path=/nowhere", "top=2"], tmp_path) == 0
    out = capsys.readouterr().out
    assert "no oracle: gaps are the reference engine's own" in out
    assert "1 golden tokens not the reference engine's choice" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--recorded", "--noise=measured"], "--recorded reads no model"),
        (["--noise=loud"], "--noise=loud: expected a number of nats"),
        (["--noise=-1"], "-1.0 nats, expected a finite number"),
        (["variant=f32"], "read by --noise=measured alone"),
        (["top=0"], "top=0"),
        (["engine=replay", "engine.folder=x"], "engine=replay is not read"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, capsys: Captured, argv: list[str], said: str) -> None:
    """One line, exit code 2."""
    assert run([*PART, *argv], tmp_path) == UsageError.exit_code
    assert said in capsys.readouterr().err


def test_gaps_hold_one_place_for_each_token(gate: Golden, oracle: Oracle) -> None:
    """Noise that is far larger than every gap turns half of the tokens, none at all turns those behind already."""
    gaps: Gaps = oracle_gaps(gate, oracle)
    assert gaps.turned(Gaussian(1e9)) == pytest.approx(gaps.places / 2, rel=1e-6)
    assert gaps.turned(Gaussian(0.0)) == gaps.not_first

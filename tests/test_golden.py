"""Goldens: read, written, hashed, judged and exchanged without a bit lost."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.gaps import cannot_discriminate, exact_ties, fixture_discrimination
from harness.golden import (
    Bar,
    Golden,
    Recorded,
    export_golden,
    import_folder,
    load_golden,
    show_golden,
    verify_golden,
    write_golden,
)
from harness.rebless import environment_differs, rebless
from harness.sampling import plain_greedy_settings
from variants.errors import InputError

SAMPLES = Path(__file__).parents[1].parent / "shared" / "samples"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the recorded samples are not on this machine")
SAMPLE_NAMES = ("deepseek_v2_greedy", "olmo2_greedy_1b")


def make(tokens: object, **fields: object) -> Golden:
    runs = np.asarray(tokens, dtype=np.int32)
    given = {"name": "tiny", "prompts": tuple((1, 5 + n) for n in range(runs.shape[1])), "tokens": runs, **fields}
    return Golden(**given)  # type: ignore[arg-type]


def equal_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("name", "shape", "bar"), [("gate", (3, 8, 16), "STRICT"), ("wide", (1, 64, 64), "UNMEASURED")]
)
def test_shipped_golden_loads_with_its_measured_bar(name: str, shape: tuple[int, ...], bar: str) -> None:
    """Three identical runs make `gate` STRICT; one run leaves `wide` UNMEASURED."""
    golden = load_golden(name)
    assert golden.name == name
    assert golden.tokens.shape == shape
    assert golden.bar is Bar[bar]
    assert golden.plain_greedy
    assert golden.sampling["eos"] == "ignored"
    assert verify_golden(name) == []


@pytest.mark.parametrize("name", ["gate", "wide"])
def test_round_trip_is_bitwise(name: str, tmp_path: Path) -> None:
    """A golden that is written and read again has the same bits, words and hashes."""
    golden = load_golden(name)
    again = load_golden(write_golden(golden, tmp_path / "copy.json").path or "")
    for field in ("tokens", "top_ids", "top_logprobs"):
        assert equal_bits(getattr(golden, field), getattr(again, field)), field
    for field in ("name", "prompts", "texts", "provenance", "sampling", "hash", "battery_hash", "bar"):
        assert getattr(golden, field) == getattr(again, field), field


def test_arrays_of_the_file_are_kept_as_the_shipped_layout(tmp_path: Path) -> None:
    """Every array of the shipped npz is reproduced, padding and dtypes included."""
    golden = load_golden("gate")
    written = write_golden(golden, tmp_path / "gate")
    assert golden.path is not None
    assert written.path is not None
    with np.load(golden.path.with_suffix(".npz")) as old, np.load(written.path.with_suffix(".npz")) as new:
        assert sorted(old.files) == sorted(new.files)
        assert all(equal_bits(old[key], new[key]) for key in old.files)


def test_hash_ignores_compression_and_sees_every_token(tmp_path: Path) -> None:
    """The content hash is of values: another compression keeps it, one changed id anywhere moves it."""
    golden = load_golden("gate")
    path = write_golden(golden, tmp_path / "gate").path
    assert path is not None
    npz = path.with_suffix(".npz")
    with np.load(npz) as file:
        arrays = dict(file)
    before = npz.read_bytes()
    np.savez(npz, **arrays)  # stored, not deflated
    assert npz.read_bytes() != before
    assert load_golden(path).hash == golden.hash
    seen = {golden.hash}
    for place in [(0, 0, 0), (2, 7, 15)]:
        tokens = golden.tokens.copy()
        tokens[place] += 1
        seen.add(replace(golden, tokens=tokens).hash)
    assert golden.top_logprobs is not None
    moved = golden.top_logprobs.copy()
    moved[3, 4, 19] = np.nextafter(moved[3, 4, 19], np.float32(-100))
    seen.add(replace(golden, top_logprobs=moved).hash)
    assert len(seen) == 4
    assert replace(golden, top_logprobs=golden.top_logprobs.astype(np.float64)).hash == golden.hash


def test_battery_hash_is_of_the_prompts_alone() -> None:
    """Other tokens keep the battery hash; another prompt, or the same ids cut otherwise, moves it."""
    golden = make([[[7, 8], [9, 9]]], prompts=((1, 2), (3,)))
    assert replace(golden, tokens=golden.tokens + 1).battery_hash == golden.battery_hash
    assert replace(golden, prompts=((1,), (2, 3))).battery_hash != golden.battery_hash


def test_bar_is_measured_over_all_places() -> None:
    """One differing place in one of K runs makes the bar DISTRIBUTIONAL."""
    runs = np.tile(np.arange(6, dtype=np.int32).reshape(1, 2, 3), (4, 1, 1))
    assert make(runs).bar is Bar.STRICT
    assert make(runs[:1]).bar is Bar.UNMEASURED
    runs[3, 1, 2] = 99
    assert make(runs).bar is Bar.DISTRIBUTIONAL


def test_hash_cannot_go_stale() -> None:
    """A golden copies what it is given and is read-only, so its hash stays true."""
    tokens = np.array([[[1, 2]]], dtype=np.int32)
    golden = make(tokens)
    before = golden.hash
    tokens[0, 0, 0] = 9
    assert golden.tokens[0, 0, 0] == 1
    assert golden.hash == before
    with pytest.raises(ValueError, match="read-only"):
        golden.tokens[0, 0, 0] = 3


@pytest.mark.parametrize(
    ("key", "value"),
    [("runs_identical", False), ("runs", 2), ("prompts_num", 7), ("tokens_per_prompt", 17), ("hash", "0" * 64)],
)
def test_a_claim_that_the_arrays_contradict_is_refused(key: str, value: object, tmp_path: Path) -> None:
    """What the JSON says about the arrays is recomputed, never believed."""
    path = write_golden(load_golden("gate"), tmp_path / "gate").path
    assert path is not None
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, key: value}))
    with pytest.raises(InputError, match=f"says {key} is"):
        load_golden(path)


def test_identical_claimed_of_runs_that_differ_is_refused(tmp_path: Path) -> None:
    """`runs_identical: true` over runs that differ does not make a golden STRICT."""
    path = write_golden(make([[[1, 2]], [[1, 3]]]), tmp_path / "g").path
    assert path is not None
    described = json.loads(path.read_text())
    assert described["runs_identical"] is False
    path.write_text(json.dumps({**described, "runs_identical": True}))
    with pytest.raises(InputError, match="runs_identical is True, its arrays say False"):
        load_golden(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.zeros((0, 1, 4), np.int32)}, "nothing to compare"),
        ({"tokens": np.zeros((1, 1, 0), np.int32)}, "nothing to compare"),
        ({"tokens": np.full((1, 1, 4), -1, np.int32)}, "holds no token"),
        ({"tokens": np.zeros((2, 4), np.int32)}, "expected"),
        ({"tokens": np.zeros((1, 2, 4), np.int32)}, "expected"),
        ({"tokens": np.zeros((1, 1, 4), np.float32)}, "expected integers"),
        ({"tokens": np.full((1, 1, 4), -2, np.int32)}, "expected -1"),
        ({"tokens": np.array([[[3, -1, 4]]], np.int32)}, r"row \[0, 0\] has a token at 2 after its end"),
        ({"prompts": ()}, "holds no prompt"),
        ({"prompts": ((),)}, "prompt 0 is empty"),
        ({"texts": ("a", "b")}, "2 texts for 1 prompts"),
        ({"top_ids": np.zeros((1, 4, 2), np.int32)}, "must come together"),
        ({"top_ids": np.zeros((1, 3, 2), np.int32), "top_logprobs": np.zeros((1, 3, 2), np.float32)}, "top-k shape"),
        ({"top_ids": np.zeros((1, 4, 2), np.int32), "top_logprobs": np.zeros((1, 4, 2), np.float16)}, "float16"),
    ],
)
def test_a_golden_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    """Empty, misshapen and contradictory goldens never come into being."""
    good = {"name": "bad", "prompts": ((1, 2),), "tokens": np.zeros((1, 1, 4), np.int32)}
    with pytest.raises(InputError, match=message):
        Golden(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "not an npz", "no tokens", "pad"])
def test_a_damaged_file_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    """Whatever is wrong with the npz ends in an InputError that names the file."""
    path = write_golden(load_golden("gate"), tmp_path / "gate").path
    assert path is not None
    npz = path.with_suffix(".npz")
    content = bytearray(npz.read_bytes())
    with np.load(npz) as file:
        arrays = dict(file)
    if damage == "missing":
        npz.unlink()
    elif damage == "truncated":
        npz.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        with zipfile.ZipFile(npz) as archive:
            start = archive.getinfo("top_ids.npy").header_offset
        content[start + 200] ^= 0xFF
        npz.write_bytes(content)
    elif damage == "not an npz":
        np.save(tmp_path / "one", np.zeros(3))
        (tmp_path / "one.npy").replace(npz)
    elif damage == "no tokens":
        del arrays["token_ids"]
        np.savez(npz, **arrays)
    else:
        arrays["prompt_len"][0] -= 1
        np.savez(npz, **arrays)
    with pytest.raises(InputError, match=r"gate\.(npz|json)"):
        load_golden(path)
    assert len(verify_golden(path)) == 1


def test_json_that_is_not_strict_is_refused(tmp_path: Path) -> None:
    """NaN is no JSON, and a list is no golden."""
    path = write_golden(load_golden("gate"), tmp_path / "gate").path
    assert path is not None
    path.write_text('{"seconds": NaN}')
    with pytest.raises(InputError, match="NaN is not JSON"):
        load_golden(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        load_golden(path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A misspelt golden is answered with the names that exist."""
    with pytest.raises(InputError, match=r"no golden 'gaet'.*gate, .*wide.*did you mean 'gate'"):
        load_golden("gaet")


def test_writing_over_a_golden_is_refused_and_a_dot_in_the_name_survives(tmp_path: Path) -> None:
    """A golden is not overwritten by accident; "a-0.26" is a name, not a suffix."""
    golden = make([[[1, 2]]])
    first = write_golden(golden, tmp_path / "a-0.26")
    assert first.path == tmp_path / "a-0.26.json"
    with pytest.raises(InputError, match="exists"):
        write_golden(golden, tmp_path / "a-0.26.json")
    assert sorted(os.listdir(tmp_path)) == ["a-0.26.json", "a-0.26.npz"]
    assert load_golden(tmp_path).hash == golden.hash


def test_exact_ties_of_the_shipped_goldens() -> None:
    """`wide` holds 63 positions whose first two logits are equal, `gate` 2."""
    assert exact_ties(load_golden("wide")) == 63
    assert exact_ties(load_golden("gate")) == 2
    assert exact_ties(make([[[1, 2]]])) is None


def test_verify_reads_the_top_list(tmp_path: Path) -> None:
    """Verification finds a tie broken to the higher id, a list out of order and an impossible probability."""
    ids = np.array([[[4, 7], [5, 6], [8, 9]]], dtype=np.int32)
    good = np.array([[[-0.7, -0.7], [-0.1, -3.0], [-0.2, -2.0]]], dtype=np.float32)
    made = {"top_ids": ids, "sampling": plain_greedy_settings()}
    fine = write_golden(make([[[4, 5, 8]]], top_logprobs=good, **made), tmp_path / "fine")
    assert verify_golden(fine.path or "") == []
    bad = good.copy()
    bad[0, 1] = [-3.0, -0.1]
    bad[0, 2] = [0.5, -2.0]
    wrong = write_golden(make([[[7, 5, 8]]], top_logprobs=bad, **made), tmp_path / "wrong")
    problems = verify_golden(wrong.path or "")
    assert any("not the lowest id" in p and "position 0" in p for p in problems)
    assert any("decreasing order" in p and "position 1" in p for p in problems)
    assert any("above 0" in p and "position 2" in p for p in problems)


def test_show_is_plain_json() -> None:
    """What is shown serialises strictly and holds the figures a reader asks for."""
    shown = json.loads(json.dumps(show_golden(load_golden("wide")), allow_nan=False))
    assert (shown["bar"], shown["tokens"], shown["exact_ties"]) == ("unmeasured", 4096, 63)
    assert shown["smallest_gap_nats"] == 0.03125


def test_export_keeps_the_order_of_runs_that_differ(tmp_path: Path) -> None:
    """The K runs of a DISTRIBUTIONAL golden come back in their order, run 0 first."""
    golden = make([[[1, 2, -1]], [[1, 3, 4]], [[1, 2, 5]]])
    export_golden(golden, tmp_path / "out")
    assert equal_bits(import_folder(tmp_path / "out").tokens, golden.tokens)


def test_padding_that_contradicts_the_length_is_refused(tmp_path: Path) -> None:
    """A prompt is neither cut nor lengthened by a wrong prompt_len, also where the JSON holds no hash."""
    path = write_golden(make([[[1, 2], [3, 4]]], prompts=((1, 5, 6), (1, 7))), tmp_path / "g").path
    assert path is not None
    described = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in described.items() if not k.endswith("hash")}))
    with np.load(path.with_suffix(".npz")) as file:
        arrays = dict(file)
    for lengths in ([2, 2], [3, 3], [4, 2]):
        np.savez(path.with_suffix(".npz"), **{**arrays, "prompt_len": np.array(lengths, np.int32)})
        with pytest.raises(InputError, match="contradicts the -1 padding"):
            load_golden(path)


@needs_samples
@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_samples_round_trip_through_both_formats(name: str, tmp_path: Path) -> None:
    """A folder of token files survives import and export, and NAME.npz between them, array for array."""
    golden = import_folder(SAMPLES / name)
    assert golden.bar is Bar.STRICT
    assert golden.tokens.shape[0] == 5
    via_npz = load_golden(write_golden(golden, tmp_path / name).path or "")
    assert via_npz.hash == golden.hash
    export_golden(via_npz, tmp_path / "out")
    for file in sorted(os.listdir(SAMPLES / name)):
        ours, theirs = tmp_path / "out" / file, SAMPLES / name / file
        if file.endswith(".npy"):
            assert equal_bits(np.load(ours), np.ascontiguousarray(np.load(theirs))), file
        else:
            assert ours.read_bytes() == theirs.read_bytes(), file
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(SAMPLES / name))


def write_folder(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / name, array)
    for i in range(len(arrays["greedy_ids"])):
        np.array([1, 40 + i], dtype="<i4").tofile(folder / f"p{i}_prompt.i32")
    return folder


def test_recorded_gaps_keep_zero_outside_and_unknown_apart(tmp_path: Path) -> None:
    """0 stays 0.0 (not a tie), 99999000 becomes infinity under a mask, a missing file becomes NaN."""
    ids = np.array([[3, 4, 5]], dtype=np.int32)
    gaps = np.array([[0, 250, 99_999_000]], dtype=np.int32)
    golden = import_folder(write_folder(tmp_path / "a", greedy_ids=ids, our_ids=ids, neartie_gap_mnats=gaps))
    assert golden.recorded is not None
    assert golden.bar is Bar.UNMEASURED
    np.testing.assert_array_equal(golden.recorded.gap_nats, [[0.0, 0.25, np.inf]])
    assert golden.recorded.outside.tolist() == [[False, False, True]]
    without = import_folder(write_folder(tmp_path / "b", greedy_ids=ids, our_ids=ids)).recorded
    assert without is not None
    assert np.isnan(without.gap_nats).all()
    assert not without.outside.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"greedy_dist": np.array([[[3, 3], [4, 4], [6, 5]]], np.int32)}, "not run 0"),
        ({"greedy_dist": np.array([[3, 4, 5]], np.int32)}, "expected 3 dimensions"),
        ({"our_ids": np.array([[3, 4]], np.int32), "neartie_gap_mnats": np.zeros((1, 3), np.int32)}, "our_ids"),
        ({"neartie_gap_mnats": np.zeros((1, 3), np.int32)}, "without our_ids"),
        ({"our_ids": np.zeros((1, 3), np.int32), "neartie_gap_mnats": np.full((1, 3), -1, np.int32)}, "expected 0"),
        ({"our_ids": np.array([[3.0, 4.0, 5.0]])}, "expected integers"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(
    change: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    """Files of two captures in one folder are not quietly mixed."""
    folder = write_folder(tmp_path / "a", greedy_ids=np.array([[3, 4, 5]], np.int32), **change)
    with pytest.raises(InputError, match=message):
        import_folder(folder)


def test_prompt_files_are_counted_and_measured(tmp_path: Path) -> None:
    """A missing, a surplus and a torn prompt file are each named."""
    folder = write_folder(tmp_path / "a", greedy_ids=np.array([[3], [4]], np.int32))
    prompt = folder / "p1_prompt.i32"
    content = prompt.read_bytes()
    (folder / "p2_prompt.i32").write_bytes(content)
    with pytest.raises(InputError, match=r"p2_prompt\.i32 exists"):
        import_folder(folder)
    (folder / "p2_prompt.i32").unlink()
    prompt.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"p1_prompt.i32: 7 bytes"):
        import_folder(folder)
    prompt.unlink()
    with pytest.raises(InputError, match=r"cannot read .*p1_prompt.i32"):
        import_folder(folder)


def test_export_says_what_it_leaves_out_and_refuses_a_full_folder(tmp_path: Path) -> None:
    """The token files hold no logprobs: the caller is told, and nothing is overwritten."""
    golden = load_golden("gate")
    assert "top logprobs" in export_golden(golden, tmp_path / "out")
    back = load_golden(tmp_path / "out")
    assert equal_bits(back.tokens, golden.tokens)
    assert back.battery_hash == golden.battery_hash
    with pytest.raises(InputError, match="not an empty folder"):
        export_golden(golden, tmp_path / "out")


def test_discrimination_of_random_logits_follows_their_spread() -> None:
    """At 32,000 normal logits of sd 0.5, 1 and 3 about 65, 40 and 15 % of top-2 gaps are under 0.125 nats.

    The share of 600 draws has a standard error of 0.02; 0.06 is three of them.
    """
    rng = np.random.default_rng(0)
    top = np.sort(np.partition(rng.standard_normal((600, 32_000), dtype=np.float32), -2)[:, -2:])[:, ::-1]
    refused = []
    for sd, expected in [(0.5, 0.65), (1.0, 0.40), (3.0, 0.15)]:
        values = (top * sd - 20.0).reshape(1, 600, 2).astype(np.float64)
        ids = np.tile(np.array([1, 2], np.int32), (1, 600, 1))
        golden = make(np.ones((1, 1, 600)), top_ids=ids, top_logprobs=values)
        share = fixture_discrimination(golden, 0.125)
        assert share == pytest.approx(expected, abs=0.06)
        refused.append(cannot_discriminate(golden, 0.125) is not None)
    assert refused == [True, True, False]


def test_discrimination_of_the_shipped_battery() -> None:
    """The trained checkpoint can discriminate at an eighth of a nat; without logprobs the share is unknown."""
    golden = load_golden("wide")
    share = fixture_discrimination(golden, 0.125)
    assert share is not None
    assert 0.02 < share < 0.06
    assert cannot_discriminate(golden, 0.125) is None
    assert "cannot discriminate" in (cannot_discriminate(golden, 5.0) or "")
    assert fixture_discrimination(make([[[1]]]), 0.1) is None


def test_positions_past_an_end_have_no_gap() -> None:
    """A row that ended early does not lend its padding to the share."""
    ids = np.array([[[4, 5], [0, 0]]], dtype=np.int32)
    golden = make([[[4, -1]]], top_ids=ids, top_logprobs=np.array([[[-0.1, -3.0], [0.0, 0.0]]]))
    assert exact_ties(golden) == 0
    assert fixture_discrimination(golden, 0.5) == 0.0


def test_moved_environment_asks_for_the_comparison_first(tmp_path: Path) -> None:
    """The stamp of another environment is named key by key, and re-blessing waits for the A/B."""
    golden = write_golden(make([[[1, 2]]], provenance={"torch": "2.11.0", "device": "cpu"}), tmp_path / "g")
    assert environment_differs(golden, {"torch": "2.11.0", "device": "cpu", "git": "abc"}) == []
    here = {"torch": "2.13.0", "device": "cpu", "git": "def"}
    said = environment_differs(golden, here)
    assert said == ["environment differs: compare old and new code here first", "torch: golden 2.11.0, here 2.13.0"]
    assert "no stamp" in environment_differs(make([[[1]]]), here)[0]
    with pytest.raises(InputError, match="compare old and new code here first"):
        rebless(golden, replace(golden, tokens=np.array([[[1, 3]]])), who="a", why="b", environment=here)
    with pytest.raises(InputError, match="needs who and why"):
        rebless(
            golden, replace(golden, tokens=np.array([[[1, 3]]])), who=" ", why="b", environment=here, compared="equal"
        )
    assert load_golden(golden.path or "").hash == golden.hash


def test_reblessing_keeps_the_old_golden_and_both_stamps(tmp_path: Path) -> None:
    """A new golden carries who, why, when and both environments; the old one stays readable beside it."""
    old = write_golden(make([[[1, 2]]], provenance={"torch": "2.11.0", "engine": "x"}), tmp_path / "g")
    here = {"torch": "2.13.0", "git": "def"}
    new = rebless(
        old,
        replace(old, tokens=np.array([[[1, 3]]])),
        who="ann",
        why="torch moved",
        environment=here,
        compared="both give 3",
    )
    read = load_golden(tmp_path / "g.json")
    assert read.hash == new.hash != old.hash
    assert read.tokens.tolist() == [[[1, 3]]]
    (blessed,) = read.provenance["blessed"]
    assert blessed["who"] == "ann"
    assert blessed["why"] == "torch moved"
    assert blessed["replaced"] == old.hash
    assert blessed["environment_before"] == {"torch": "2.11.0"}
    assert blessed["environment_after"] == here
    assert environment_differs(read, here) == []
    assert "torch" not in read.provenance  # the old stamp is history, not a second opinion
    assert load_golden(tmp_path / f"g-{old.hash[:12]}.json").hash == old.hash
    again = rebless(read, replace(read, tokens=np.array([[[1, 4]]])), who="bob", why="fixed", environment=here)
    assert [b["who"] for b in again.provenance["blessed"]] == ["ann", "bob"]


def test_recorded_candidate_of_another_shape_is_refused() -> None:
    """A candidate recorded on other places than the golden's cannot be laid beside it."""
    shape = (1, 3)
    recorded = Recorded(tokens=np.zeros(shape, np.int32), gap_nats=np.zeros(shape), outside=np.zeros(shape, bool))
    with pytest.raises(InputError, match="recorded candidate has shape"):
        make([[[1, 2]]], recorded=recorded)

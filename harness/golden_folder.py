"""A golden as a folder of token files, with a candidate's tokens beside it.

`p{i}_prompt.i32` (little-endian int32 prompt ids), `greedy_ids.npy` [N, T] (run 0), `greedy_dist.npy` [N, T, K] (all
runs, -1 = ended early), `our_ids.npy` [N, T] (the candidate, free-running), `neartie_gap_mnats.npy` [N, T] (the
reference teacher-forced on the candidate's tokens: its argmax logprob minus the token's, in thousandths of a nat,
99999000 or infinity = outside its top list, NaN = not measured).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.golden_data import Golden, Recorded, as_ids, check_ends
from harness.golden_io import write_atomic
from harness.row_ends import cut_after, repeated_end
from harness.sampling import normalize_sampling, with_generation_config
from variants.errors import InputError

OUTSIDE_MNATS = 99_999_000
IDS, RUNS, CANDIDATE, GAPS = "greedy_ids.npy", "greedy_dist.npy", "our_ids.npy", "neartie_gap_mnats.npy"


def is_token_folder(path: Path) -> bool:
    """True for a folder that holds `greedy_ids.npy` or `greedy_dist.npy`."""
    return (path / IDS).is_file() or (path / RUNS).is_file()


def import_folder(folder: str | Path, *, eos: int | None = None) -> Golden:
    """The golden in `folder`, tokens [N, T, K] turned to [K, N, T]; K = 1 where only run 0 was kept.

    The layout is greedy and ends rows early by definition, which is what `sampling` records. eos: what follows this id
    in a row is padding. What a reader must be told is in the provenance, under "import_notes". Raises InputError naming
    the file that is missing, misshapen or contradicts another.
    """
    folder = Path(folder)
    if not is_token_folder(folder):
        raise InputError(
            f"{folder}: holds neither {IDS} nor {RUNS}; expected a folder of token files, as `neartie golden export "
            "gate DIR` writes one, or a file of a run (.jsonl, .csv, .safetensors, .npz) with its prompt_ids"
        )
    runs = _read_runs(folder)
    stated = {"temperature": 0.0, "eos": "stop", "stated": f"greedy by the layout ({IDS})"}
    golden = Golden(
        name=folder.resolve().name,
        prompts=_read_prompts(folder, runs.shape[1]),
        tokens=runs if eos is None else cut_after(runs, eos),
        provenance={"imported_from": "a folder of token files"},
        sampling=with_generation_config(normalize_sampling(stated), folder),
        path=folder,
    )
    recorded, notes = _read_recorded(folder, golden, eos)
    notes = [*import_doubts(golden), *notes]
    more = {"import_notes": notes} if notes else {}
    return replace(golden, recorded=recorded, provenance=golden.provenance | more)


def import_doubts(golden: Golden) -> list[str]:
    """What in an imported golden looks like a slip of the tool that wrote it; none of it can be known from here."""
    found = []
    firsts = {row[:2] for row in golden.prompts}
    if len(firsts) == 1 and len(first := next(iter(firsts))) == 2 and first[0] == first[1]:
        found.append(f"every prompt begins with id {first[0]} twice: a double BOS, if that is the BOS")
    if padding := repeated_end(golden.tokens[0]):
        token, rows = padding
        found.append(
            f"golden's rows {_listed(rows)} end in id {token} again and again: if that is the end of sequence, its "
            f"padding counts as tokens here; leave it out with: neartie golden import FROM OUT --eos={token}"
        )
    return found


def export_golden(golden: Golden, folder: str | Path) -> tuple[str, ...]:
    """Writes the golden as a folder of token files; returns what this layout cannot hold and was left out.

    Raises InputError when the folder exists and is not empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; name a new one")
    arrays = {IDS: golden.tokens[0], RUNS: golden.tokens.transpose(1, 2, 0)}
    left_out = ["top logprobs"] if golden.top_logprobs is not None else []
    left_out += ["provenance, sampling and texts"]
    if golden.recorded is not None:
        arrays[CANDIDATE] = golden.recorded.tokens
        if np.isnan(golden.recorded.gap_nats).any():
            left_out.append("the recorded gaps (unknown at some positions)")
        else:
            arrays[GAPS] = _to_mnats(golden.recorded)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, prompt in enumerate(golden.prompts):
            write_atomic(folder / f"p{i}_prompt.i32", np.asarray(prompt, dtype="<i4").tobytes())
        for name, array in arrays.items():
            np.save(folder / name, np.ascontiguousarray(array, dtype=np.int32))
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; choose a folder that can be written") from error
    return tuple(left_out)


def _read_runs(folder: Path) -> np.ndarray:
    run0 = _load_ids(folder / IDS, 2) if (folder / IDS).is_file() else None
    if not (folder / RUNS).is_file():
        assert run0 is not None  # is_token_folder
        return run0[None]
    stored = _load(folder / RUNS, 3)
    if stored.dtype.kind == "f":
        raise InputError(
            f"{folder / RUNS}: got {stored.dtype} {list(stored.shape)}, a distribution (probabilities, logprobs or "
            "logits); this file is the token ids of all K runs, int32 [N, T, K]. Leave it out where there is one run"
        )
    runs = as_ids(stored, str(folder / RUNS))
    if run0 is not None and runs.shape[1:] == run0.shape and len(runs) and np.array_equal(runs[0], run0):
        return runs  # [K, N, T] already: run 0 says so
    runs = runs.transpose(2, 0, 1)
    if run0 is not None and (runs.shape[0] == 0 or not np.array_equal(runs[0], run0)):
        raise InputError(
            f"{folder}: {IDS} {list(run0.shape)} is not run 0 of {RUNS} {list(stored.shape)}, which is [N, T, K]; the "
            "folder mixes two captures"
        )
    return runs


def _read_prompts(folder: Path, count: int) -> tuple[tuple[int, ...], ...]:
    prompts, wide = [], True
    for i in range(count):
        path = folder / f"p{i}_prompt.i32"
        try:
            content = path.read_bytes()
        except OSError as error:
            there = ", ".join(sorted(p.name for p in folder.glob("*prompt*"))[:3]) or "none"
            raise InputError(
                f"cannot read {path}: {error.strerror}; expected p0_prompt.i32 to p{count - 1}_prompt.i32, "
                f"little-endian int32 ids, for {count} rows of tokens; found {there}"
            ) from error
        if len(content) % 4:
            raise InputError(f"{path}: {len(content)} bytes, expected whole int32 ids (a multiple of 4)")
        ids = np.frombuffer(content, dtype="<i4")
        wide &= ids.size > 0 and ids.size % 2 == 0 and not ids[1::2].any()
        prompts.append(tuple(ids.tolist()))
    if wide and prompts:
        raise InputError(
            f"{folder}: every other id of every prompt is 0: p0_prompt.i32 and its like hold int64, not int32"
        )
    if (folder / f"p{count}_prompt.i32").exists():
        raise InputError(f"{folder}: p{count}_prompt.i32 exists, but the token files hold {count} prompts")
    return tuple(prompts)


def _read_recorded(folder: Path, golden: Golden, eos: int | None) -> tuple[Recorded | None, list[str]]:
    """The candidate beside the golden, and what to say of it; one of another shape is no run of these prompts."""
    shape = golden.tokens.shape[1:]
    if not (folder / CANDIDATE).is_file():
        if (folder / GAPS).is_file():
            raise InputError(f"{folder}: {GAPS} without {CANDIDATE}, the tokens it was measured on")
        return None, []
    tokens = _load_ids(folder / CANDIDATE, 2)
    tokens = tokens if eos is None else cut_after(tokens, eos)
    check_ends(tokens, f"{folder / CANDIDATE}: prompt")
    gaps = _read_gaps(folder / GAPS, tokens.shape) if (folder / GAPS).is_file() else np.full(tokens.shape, np.nan)
    if tokens.shape != shape:
        return None, [other_shape(folder, tokens.shape, shape)]
    notes = []
    if (gaps == 0).all() and (tokens != golden.tokens[0]).any():
        notes = [f"{GAPS} is 0 at every place, also where the tokens differ: read as not measured"]
        gaps = np.full(shape, np.nan)
    return Recorded(tokens=tokens, gap_nats=gaps, outside=np.isposinf(gaps)), notes


def other_shape(folder: Path, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What to do with a candidate whose tokens [N, T] are of another shape than the golden's."""
    here = f"{CANDIDATE} holds {got[0]} x {got[1]} tokens, the golden {expected[0]} x {expected[1]}: left out"
    if got == expected[::-1]:
        return f"{here}; it is transposed, expected [prompts, tokens]"
    few = f" limit={got[0]}" * (got[0] < expected[0]) + f" max_tokens={got[1]}" * (got[1] < expected[1])
    return f"{here}; score what both have with: engine=replay engine.folder={folder / CANDIDATE}{few}"


def _read_gaps(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Nats, float64; NaN for not measured, infinity for outside the list."""
    stored = _load(path, 2).astype(np.float64)
    if stored.shape != shape:
        raise InputError(f"{path} is {stored.shape}, {CANDIDATE} {shape}; they are of the same places")
    mnats = np.where(np.isposinf(stored), OUTSIDE_MNATS, stored)
    known = mnats[~np.isnan(mnats)]
    if (known != np.rint(known)).any():
        raise InputError(
            f"{path}: holds {known[known != np.rint(known)][0]:g}, expected whole thousandths of a nat; nats go "
            "times 1000"
        )
    if (known < 0).any() or (known > OUTSIDE_MNATS).any():
        raise InputError(
            f"{path}: runs from {known.min():g} to {known.max():g}, thousandths of a nat are expected 0 to "
            f"{OUTSIDE_MNATS} (outside the top list); NaN is not measured"
        )
    return np.where(mnats == OUTSIDE_MNATS, np.inf, mnats / 1000.0)


def _to_mnats(recorded: Recorded) -> np.ndarray:
    finite = np.where(recorded.outside, 0.0, recorded.gap_nats)
    return np.where(recorded.outside, OUTSIDE_MNATS, np.rint(finite * 1000.0)).astype(np.int32)


def _load_ids(path: Path, ndim: int) -> np.ndarray:
    return as_ids(_load(path, ndim), str(path))


def _load(path: Path, ndim: int) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        if "Object arrays" in str(error):
            raise InputError(
                f"{path}: holds Python objects, such as rows of unequal length; pad them with -1 and save int32"
            ) from error
        raise InputError(f"{path}: damaged or not an npy file ({str(error).split('. ')[0]})") from error
    if not isinstance(array, np.ndarray) or array.ndim != ndim:
        raise InputError(f"{path}: got shape {getattr(array, 'shape', None)}, expected {ndim} dimensions")
    return array


def _listed(rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")

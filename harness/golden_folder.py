"""A golden as a folder of token files, with a candidate's tokens beside it.

`p{i}_prompt.i32` (little-endian int32 prompt ids), `greedy_ids.npy` [N, T] (run 0), `greedy_dist.npy` [N, T, K] (all
runs, -1 = ended early), `our_ids.npy` [N, T] (the candidate, free-running), `neartie_gap_mnats.npy` [N, T] (the
reference teacher-forced on the candidate's tokens: its argmax logprob minus the token's, in thousandths of a nat,
99999000 = outside its top list).
"""

from pathlib import Path

import numpy as np

from harness.golden_data import Golden, Recorded, as_ids, check_ends
from harness.golden_io import write_atomic
from harness.sampling import normalize_sampling, with_generation_config
from variants.errors import InputError

OUTSIDE_MNATS = 99_999_000
IDS, RUNS, CANDIDATE, GAPS = "greedy_ids.npy", "greedy_dist.npy", "our_ids.npy", "neartie_gap_mnats.npy"


def is_token_folder(path: Path) -> bool:
    """True for a folder that holds `greedy_ids.npy` or `greedy_dist.npy`."""
    return (path / IDS).is_file() or (path / RUNS).is_file()


def import_folder(folder: str | Path) -> Golden:
    """The golden in `folder`, tokens [N, T, K] turned to [K, N, T]; K = 1 where only run 0 was kept.

    The layout is greedy and ends rows early by definition, which is what `sampling` records. Raises InputError
    naming the file that is missing, misshapen or contradicts another.
    """
    folder = Path(folder)
    if not is_token_folder(folder):
        raise InputError(f"{folder}: holds neither {IDS} nor {RUNS}; expected a folder of token files")
    runs = _read_runs(folder)
    stated = {"temperature": 0.0, "eos": "stop", "stated": f"greedy by the layout ({IDS})"}
    return Golden(
        name=folder.resolve().name,
        prompts=_read_prompts(folder, runs.shape[1]),
        tokens=runs,
        provenance={"imported_from": "a folder of token files"},
        sampling=with_generation_config(normalize_sampling(stated), folder),
        path=folder,
        recorded=_read_recorded(folder, runs.shape[1:]),
    )


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
    runs = _load_ids(folder / RUNS, 3).transpose(2, 0, 1)
    if run0 is not None and (runs.shape[0] == 0 or not np.array_equal(runs[0], run0)):
        raise InputError(f"{folder}: {IDS} is not run 0 of {RUNS}; the folder mixes two captures")
    return runs


def _read_prompts(folder: Path, count: int) -> tuple[tuple[int, ...], ...]:
    prompts = []
    for i in range(count):
        path = folder / f"p{i}_prompt.i32"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}; expected one file a prompt, {count}") from error
        if len(content) % 4:
            raise InputError(f"{path}: {len(content)} bytes, expected whole int32 ids (a multiple of 4)")
        prompts.append(tuple(np.frombuffer(content, dtype="<i4").tolist()))
    if (folder / f"p{count}_prompt.i32").exists():
        raise InputError(f"{folder}: p{count}_prompt.i32 exists, but the token files hold {count} prompts")
    return tuple(prompts)


def _read_recorded(folder: Path, shape: tuple[int, ...]) -> Recorded | None:
    if not (folder / CANDIDATE).is_file():
        if (folder / GAPS).is_file():
            raise InputError(f"{folder}: {GAPS} without {CANDIDATE}, the tokens it was measured on")
        return None
    tokens = _load_ids(folder / CANDIDATE, 2)
    check_ends(tokens, f"{folder / CANDIDATE}: prompt")
    if not (folder / GAPS).is_file():
        return Recorded(tokens=tokens, gap_nats=np.full(shape, np.nan), outside=np.zeros(shape, dtype=bool))
    mnats = _load_ids(folder / GAPS, 2)
    if tokens.shape != shape or mnats.shape != shape:
        raise InputError(f"{folder}: {CANDIDATE} is {tokens.shape}, {GAPS} {mnats.shape}, the golden {shape}")
    if (mnats < 0).any() or (mnats > OUTSIDE_MNATS).any():
        raise InputError(f"{folder / GAPS}: expected 0 to {OUTSIDE_MNATS} (outside the top list)")
    outside = mnats == OUTSIDE_MNATS
    return Recorded(tokens=tokens, gap_nats=np.where(outside, np.inf, mnats / 1000.0), outside=outside)


def _to_mnats(recorded: Recorded) -> np.ndarray:
    finite = np.where(recorded.outside, 0.0, recorded.gap_nats)
    return np.where(recorded.outside, OUTSIDE_MNATS, np.rint(finite * 1000.0)).astype(np.int32)


def _load_ids(path: Path, ndim: int) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise InputError(f"{path}: damaged or not an npy file ({error})") from error
    if not isinstance(array, np.ndarray) or array.ndim != ndim:
        raise InputError(f"{path}: got shape {getattr(array, 'shape', None)}, expected {ndim} dimensions")
    return as_ids(array, str(path))

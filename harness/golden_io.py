"""NAME.json + NAME.npz: the file format of a golden, read and written bit for bit.

The npz holds prompt_ids int32 [N, L] padded with -1, prompt_len int32 [N], token_ids int32 [K, N, T] and, where known,
top_ids int32 [N, T, k] and top_logprobs float [N, T, k] of run 0, recorded_ids int32 [N, T] and recorded_gap_nats
float64 [N, T] of a candidate that came with the golden (inf = outside the top list, NaN = unknown). The JSON holds
everything else; what it says about the arrays (sizes, identical runs, hashes) is checked against them, never believed.
"""

import contextlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.golden_data import ENDED, Golden, Recorded, as_ids, check_ends
from harness.sampling import normalize_sampling, with_generation_config
from variants.errors import InputError

LAYOUT = (
    "npz: prompt_ids [N,L] padded with -1, prompt_len [N], token_ids [K,N,T], top_ids [N,T,k], top_logprobs [N,T,k] "
    "(run 0, in decreasing order)"
)
# JSON fields that describe the arrays or are modelled by Golden; every other field is provenance.
_OWN = frozenset(
    [
        "battery",
        "prompts",
        "prompts_num",
        "tokens_per_prompt",
        "runs",
        "runs_identical",
        "layout",
        "sampling",
        "hash",
        "battery_hash",
    ]
)


def read_golden(path: Path) -> Golden:
    """The golden at NAME.json (or NAME.npz, its other half); raises InputError naming the file and what is wrong."""
    path = _json_path(path)
    described = _read_json(path)
    arrays = _read_npz(path.with_suffix(".npz"))
    texts = described.get("prompts")
    golden = Golden(
        name=str(described.get("battery", path.stem)),
        prompts=_unpad(arrays, path),
        tokens=arrays["token_ids"],
        texts=tuple(str(t) for t in texts) if isinstance(texts, list) else None,
        top_ids=arrays.get("top_ids"),
        top_logprobs=arrays.get("top_logprobs"),
        provenance=_provenance(described),
        sampling=with_generation_config(normalize_sampling(described.get("sampling")), path.parent),
        path=path,
        recorded=_recorded(arrays, path),
    )
    _check_described(golden, described)
    return golden


def write_golden(golden: Golden, path: str | Path, *, overwrite: bool = False) -> Golden:
    """Writes NAME.json and NAME.npz under temporary names, then renames; returns the golden with its new path.

    Raises InputError when either file exists and `overwrite` is not set, and when the folder cannot be written.
    """
    path = _json_path(Path(path))
    for target in (path, path.with_suffix(".npz")):
        if target.exists() and not overwrite:
            raise InputError(f"{target} exists; choose another name, or re-bless it to keep the old one beside it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The JSON goes last: it holds the hash, so a write that is cut off between the two is refused by the reader.
        write_atomic(path.with_suffix(".npz"), _npz_bytes(golden))
        write_atomic(path, (json.dumps(describe(golden), indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose a folder that can be written") from error
    return replace(golden, path=path)


def describe(golden: Golden) -> dict[str, Any]:
    """What NAME.json holds for this golden."""
    k, n, t = golden.tokens.shape
    note = golden.provenance.get("prompts_note", "ids only")
    identical = {"runs_identical": bool((golden.tokens == golden.tokens[:1]).all())} if k > 1 else {}
    return {
        **{key: value for key, value in golden.provenance.items() if key != "prompts_note"},
        "sampling": golden.sampling or None,
        "battery": golden.name,
        "prompts": list(golden.texts) if golden.texts is not None else note,
        "prompts_num": n,
        "tokens_per_prompt": t,
        "runs": k,
        **identical,
        "layout": LAYOUT,
        "hash": golden.hash,
        "battery_hash": golden.battery_hash,
    }


def write_atomic(path: Path, content: bytes) -> None:
    """Writes, syncs and renames, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InputError(
            f"cannot read golden {path}: {error.strerror}; expected a NAME.json with its NAME.npz"
        ) from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and ours
        raise InputError(f"golden {path}: not strict JSON ({error})") from error
    if not isinstance(described, dict):
        raise InputError(f"golden {path}: got {type(described).__name__}, expected a JSON object")
    return described


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_path(path: Path) -> Path:
    # A name may hold a dot ("kimi-0.26"): only the two suffixes of the format are replaced.
    return path.with_suffix(".json") if path.suffix in (".json", ".npz") else path.with_name(f"{path.name}.json")


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        file = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        arrays = {name: file[name] for name in file.files} if isinstance(file, np.lib.npyio.NpzFile) else {}
    except OSError as error:
        raise InputError(f"cannot read golden {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise InputError(f"golden {path}: damaged or not an npz archive ({error})") from error
    missing = [name for name in ("prompt_ids", "prompt_len", "token_ids") if name not in arrays]
    if missing:
        raise InputError(f"golden {path}: lacks {', '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}")
    return arrays


def _unpad(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[tuple[int, ...], ...]:
    ids = as_ids(arrays["prompt_ids"], f"golden {path}: prompt_ids")
    lengths = as_ids(arrays["prompt_len"], f"golden {path}: prompt_len")
    if ids.ndim != 2 or lengths.shape != ids.shape[:1]:
        raise InputError(f"golden {path}: prompt_ids {ids.shape} and prompt_len {lengths.shape}, expected [N,L], [N]")
    inside = np.arange(ids.shape[1]) < lengths[:, None]
    if lengths.max(initial=0) > ids.shape[1] or ((ids != ENDED) != inside).any():
        raise InputError(f"golden {path}: prompt_len contradicts the -1 padding of prompt_ids")
    return tuple(tuple(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True))


def _recorded(arrays: Mapping[str, np.ndarray], path: Path) -> Recorded | None:
    if "recorded_ids" not in arrays:
        return None
    tokens = as_ids(arrays["recorded_ids"], f"golden {path}: recorded_ids")
    gaps = arrays.get("recorded_gap_nats", np.full(tokens.shape, np.nan))
    if gaps.shape != tokens.shape or gaps.dtype != np.float64 or (gaps < 0.0).any():
        raise InputError(f"golden {path}: recorded_gap_nats {gaps.dtype}{gaps.shape}, expected float64 {tokens.shape}")
    check_ends(tokens, f"golden {path}: recorded_ids, prompt")
    return Recorded(tokens=tokens, gap_nats=gaps, outside=np.isposinf(gaps))


def _provenance(described: Mapping[str, Any]) -> dict[str, Any]:
    provenance = {key: value for key, value in described.items() if key not in _OWN}
    if isinstance(described.get("prompts"), str):
        provenance["prompts_note"] = described["prompts"]
    return provenance


def _check_described(golden: Golden, described: Mapping[str, Any]) -> None:
    measured = {**describe(golden), "runs_identical": bool((golden.tokens == golden.tokens[:1]).all())}
    for key in ("prompts_num", "tokens_per_prompt", "runs", "runs_identical", "hash", "battery_hash"):
        if key in described and described[key] != measured[key]:
            raise InputError(
                f"golden {golden.path}: says {key} is {described[key]}, its arrays say {measured[key]}; "
                "the file was changed or mixed with another: capture it again"
            )


def _npz_bytes(golden: Golden) -> bytes:
    lengths = np.array([len(row) for row in golden.prompts], dtype=np.int32)
    ids = np.full((len(lengths), lengths.max()), ENDED, dtype=np.int32)
    for row, prompt in zip(ids, golden.prompts, strict=True):
        row[: len(prompt)] = prompt
    arrays = {"prompt_ids": ids, "prompt_len": lengths, "token_ids": golden.tokens}
    if golden.top_ids is not None and golden.top_logprobs is not None:
        arrays |= {"top_ids": golden.top_ids, "top_logprobs": golden.top_logprobs}
    if golden.recorded is not None:
        arrays |= {"recorded_ids": golden.recorded.tokens, "recorded_gap_nats": golden.recorded.gap_nats}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()

"""Load a Kimi-Linear checkpoint, one or many safetensors files, checked in full before any forward."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from variants.checkpoint_config import load_config
from variants.checkpoint_file import INDEX_NAME, WeightsFile, find_weights, staging_for, stream_tensors
from variants.checkpoint_names import EMBEDDING, HEAD, canonical_name, expected_tensors, is_float32_parameter
from variants.errors import DeviceError, InputError
from variants.model_config import ModelConfig
from variants.placement import Placement, one
from variants.side_by_side import allocated

__all__ = ["Checkpoint", "expected_tensors", "load_checkpoint", "load_config"]

# Parts of the names that transformers' save_pretrained writes with save_original_format=False.
_LANES = 8  # files that are read at once; each has a buffer of 16 MiB, and SHA-256 alone takes a core 1 to 2 GB/s
_IN_MEMORY_PARTS = (".forget_gate.", ".self_attn.conv1d.", ".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """The weights of one model under their release names, in the dtypes they were stored in.

    `rounded` names the float32 parameters that arrived in a lower dtype; `notes` says in words what was unusual.
    `sha256` is that of the weights' bytes: the file's for one `model.safetensors`; for shards that of the lines
    "<sha256>  <file name>" of all shards, sorted, each ended by a line feed. A tied head is the embedding's own tensor.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, Tensor]
    sha256: str
    notes: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    tokenizer_sha256: str | None = None


def load_checkpoint(
    path: str | Path, *, expect_sha256: str | None = None, placement: Placement | None = None
) -> Checkpoint:
    """Load every tensor of a checkpoint directory straight to where it is placed, in stored dtypes.

    placement: None for the host. Tensors that are read together lie side by side, so that stacking them copies nothing.
    Host memory grows by the weights where the device is the host, else by a chunk of each file that is read. Each byte
    is read once and hashed on the way; on other devices several files at once. Raises InputError naming file and tensor
    for whatever does not fit the config, for broken files, NaN or infinite weights, a head that contradicts
    `tie_word_embeddings` and an unexpected `sha256`; DeviceError for a device that is not there.
    """
    path, placement = Path(path), placement or one("cpu")
    for device in placement.devices:
        _check_available(device)
    config = load_config(path)
    files = find_weights(path)
    names, notes = _match_names(files, config)
    dtypes = {names[stored.name]: stored.dtype for file in files for stored in file.tensors}
    tensors = allocated(config, dtypes, placement)
    digests = _read(files, {stored: tensors[name] for stored, name in names.items()})
    notes += _tie_head(tensors, config, files)
    rounded = tuple(name for name in expected_tensors(config) if _is_rounded(name, tensors[name]))
    return Checkpoint(
        path=path,
        config=config,
        tensors={name: tensors[name] for name in expected_tensors(config)},
        sha256=_checked_sha256(path, digests, expect_sha256),
        notes=(*notes, *_rounding_notes(rounded, tensors)),
        rounded=rounded,
        tokenizer_sha256=_file_sha256(path / "tokenizer.json"),
    )


def _read(files: Sequence[WeightsFile], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Fill the tensors, by their stored names; the SHA-256 of each file by its name."""
    away = next((t.device for t in targets.values() if t.device.type != "cpu"), None)
    lanes = 1 if away is None else min(_LANES, len(files), os.cpu_count() or 1)

    def read(lane: int) -> dict[str, str]:
        staging, found = None if away is None else staging_for(away), {}
        for file in files[lane::lanes]:
            digest = hashlib.sha256()
            for _ in stream_tensors(file, place=lambda stored: targets[stored.name], digest=digest, staging=staging):
                pass
            found[file.path.name] = digest.hexdigest()
        return found

    with ThreadPoolExecutor(lanes) as pool:
        return {name: digest for lane in pool.map(read, range(lanes)) for name, digest in lane.items()}


def weights_sha256(path: str | Path) -> str:
    """`Checkpoint.sha256` of the directory as it is now, without loading it; raises InputError where it is broken."""
    digests = {file.path.name: _file_sha256(file.path) or "" for file in find_weights(Path(path))}
    return _checked_sha256(Path(path), digests, None)


def _check_available(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by backend
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"device {device!r} cannot be used ({reason}); use cpu or a device of this machine"
        ) from error


def _match_names(files: tuple[WeightsFile, ...], config: ModelConfig) -> tuple[dict[str, str], list[str]]:
    """Map each stored name to its release name, refusing whatever is unexpected, repeated, misshaped or missing."""
    expected = expected_tensors(config)
    names: dict[str, str] = {}
    missing = dict.fromkeys(expected)
    for file in files:
        for stored in file.tensors:
            name = canonical_name(stored.name)
            if name not in expected:
                raise InputError(f"{file.path}: unexpected tensor {stored.name}{_hint(stored.name)}")
            if name not in missing:
                raise InputError(f"{file.path}: tensor {stored.name} is there under another name too; keep one")
            if stored.shape != expected[name]:
                got, want = list(stored.shape), list(expected[name])
                raise InputError(f"{file.path}: tensor {stored.name} has shape {got}, config.json expects {want}")
            names[stored.name] = name
            del missing[name]
    if config.tie_word_embeddings:
        missing.pop(HEAD, None)
    if missing:
        where = files[0].path if len(files) == 1 else files[0].path.parent / INDEX_NAME
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{where}: tensor {next(iter(missing))} is missing{more}; config.json asks for it")
    renamed = sorted(stored for stored, name in names.items() if stored != name)
    return names, [f"{len(renamed)} dense MLP tensors are named as experts' ({renamed[0]}, ...)"] if renamed else []


def _hint(stored: str) -> str:
    if any(part in stored for part in _IN_MEMORY_PARTS):
        return (
            ": a name of transformers' in-memory form; convert it with `neartie convert`, or save the model again with "
            "save_original_format=True"
        )
    return "; config.json has no such tensor"


def _tie_head(tensors: dict[str, Tensor], config: ModelConfig, files: tuple[WeightsFile, ...]) -> list[str]:
    if not config.tie_word_embeddings:
        return []
    embedding, head = tensors[EMBEDDING], tensors.get(HEAD)
    tensors[HEAD] = embedding
    if head is None:
        return []
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        holder = next(file.path for file in files if any(stored.name == HEAD for stored in file.tensors))
        raise InputError(
            f"{holder}: tensor {HEAD} differs from {EMBEDDING} although tie_word_embeddings is true; "
            "set it to false in config.json if the stored head is meant, or remove the head"
        )
    return [f"{HEAD} is stored although tie_word_embeddings is true; it equals {EMBEDDING} and shares its storage"]


def _is_rounded(name: str, tensor: Tensor) -> bool:
    return is_float32_parameter(name) and tensor.dtype.itemsize < torch.float32.itemsize


def _rounding_notes(rounded: tuple[str, ...], tensors: dict[str, Tensor]) -> list[str]:
    """One note per kind of parameter, A_log say, with its first layer."""
    by_kind: dict[str, list[str]] = {}
    for name in rounded:
        by_kind.setdefault(name.rpartition(".")[2], []).append(name)
    return [
        f"{kind} is stored as {str(tensors[names[0]].dtype).removeprefix('torch.')} in {len(names)} layers, "
        f"not as float32 (first {names[0]}): what rounding took from it is lost"
        for kind, names in by_kind.items()
    ]


def _checked_sha256(path: Path, digests: dict[str, str], expected: str | None) -> str:
    if len(digests) == 1 and not (path / INDEX_NAME).exists():
        (sha256,) = digests.values()
    else:
        lines = sorted(f"{digest}  {name}\n" for name, digest in digests.items())
        sha256 = hashlib.sha256("".join(lines).encode()).hexdigest()
    if expected is not None and sha256 != expected:
        raise InputError(f"{path}: the weights' SHA-256 is {sha256}, expected {expected}; this is another checkpoint")
    return sha256


def _file_sha256(file: Path) -> str | None:
    if not file.exists():
        return None
    try:
        with file.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error

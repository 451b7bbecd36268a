"""Arrays on disk under a key: written whole or not at all, and refused when a byte of them has changed."""

import hashlib
import io
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from variants.errors import DeviceError

MAGIC = b"neartie arrays 1\n"
DIGEST_BYTES = 64 + 1  # SHA-256 in hex, then a line feed


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, or None where there is none; a damaged one is warned of and read as none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    head, payload = content[: len(MAGIC) + DIGEST_BYTES], content[len(MAGIC) + DIGEST_BYTES :]
    if head != MAGIC + _digest(payload):
        warnings.warn(f"{path}: its content does not have the hash it was written with; computed again", stacklevel=2)
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return dict(arrays)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Put a file in place by a temporary name of its own, so that writers at the same moment do not meet.

    Raises DeviceError, naming the folder, when nothing can be written there.
    """
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    payload = buffer.getvalue()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(MAGIC + _digest(payload) + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DeviceError(f"cannot write {path.parent}: {error.strerror}; name another folder by results=") from error


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n"

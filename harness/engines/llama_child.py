"""llama.cpp's own server out of the `xllamacpp` wheel, in this process or as a child of `server_process`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version as distribution_version
from typing import Any

from harness.engines.server_process import announce, end_with_owner
from variants.errors import DeviceError, EngineError


@dataclass(frozen=True, kw_only=True)
class LlamaSettings:
    """How the server computes. kv: "f32" or "f16". slots: requests at a time, each of `length` tokens. threads: 0 for
    the server's own choice.
    """

    gguf: str
    kv: str = "f32"
    flash: bool = False
    slots: int = 1
    length: int = 4096
    threads: int = 0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def xllamacpp() -> Any:
    """The package; raises DeviceError where it is not installed."""
    try:
        import xllamacpp as package  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "xllamacpp":
            raise
        raise DeviceError(
            "the xllamacpp package is not installed; install it with: pip install 'neartie[llama]'"
        ) from error
    return package


def xllamacpp_version() -> str:
    return distribution_version("xllamacpp")


def start(settings: LlamaSettings) -> Any:
    """The server, listening on a free port of this host; raises EngineError where it cannot load the file."""
    package = xllamacpp()
    params = package.CommonParams()
    params.model.path = settings.gguf
    params.n_parallel = settings.slots
    params.n_ctx = settings.length * settings.slots
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = getattr(package.ggml_type, f"GGML_TYPE_{settings.kv.upper()}")
    flash = package.llama_flash_attn_type
    kind = "ENABLED" if settings.flash else "DISABLED"
    params.flash_attn_type = getattr(flash, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
    if settings.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.warmup = False
    params.ui = False
    params.port = 0
    try:
        return package.Server(params)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"llama.cpp could not start on {settings.gguf}: {error}") from error


def main() -> None:
    out = end_with_owner()
    server = start(LlamaSettings(**json.loads(sys.argv[1])))
    announce(out, server.listening_address)
    while True:  # its threads do the work
        time.sleep(3600)


if __name__ == "__main__":
    main()

"""vLLM's modules, imported when a variant first asks for one of its kernels, with its tiles pinned to the first choice.

vLLM picks tile sizes by timing them, so that two processes may sum in two orders. Its own switch takes the first
configuration of each kernel instead; it acts when vLLM is imported, and what this process cannot promise is refused.
"""

import importlib
import os
from functools import lru_cache
from importlib import metadata
from types import ModuleType

from variants.errors import DeviceError

VERSION = "0.26.0"
FIRST_CONFIG = "VLLM_TRITON_FORCE_FIRST_CONFIG"
# vLLM writes its log to stdout, where a command's own answer goes.
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def module(name: str) -> ModuleType:
    """A module of vLLM by its name under the package; DeviceError where it cannot be had as the goldens had it."""
    _prepare()
    try:
        return importlib.import_module(f"vllm.{name}")
    except ImportError as error:
        raise DeviceError(f"impl vllm: {error}; install all that vLLM {VERSION} needs, or choose impl torch") from error


@lru_cache(maxsize=1)
def _prepare() -> None:
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError as error:
        raise DeviceError(f"impl vllm needs vLLM {VERSION} beside neartie; install it, or choose impl torch") from error
    if found != VERSION:
        raise DeviceError(f"impl vllm calls the kernels of vLLM {VERSION}, got {found}: other versions round elsewhere")
    if os.environ.setdefault(FIRST_CONFIG, "1") != "1":
        raise DeviceError(f"impl vllm needs {FIRST_CONFIG}=1, got {os.environ[FIRST_CONFIG]}: unset it")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not importlib.import_module("vllm.triton_utils.force_first_config").is_installed():
        raise DeviceError(f"impl vllm: vLLM was imported before {FIRST_CONFIG}=1 was set; set it before the start")
    importlib.import_module("vllm._custom_ops")  # registers torch.ops._C and torch.ops._moe_C

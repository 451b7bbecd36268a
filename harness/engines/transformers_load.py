"""Loading Kimi-Linear into the transformers library: which kernels it binds, which parameters it rounds, what it is.

The library binds its KDA and convolution kernels when its model file is imported: those of the packages `fla` and
`causal_conv1d` where they can be imported, else its own in PyTorch. Theirs die on a CPU ("0 active drivers").
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from variants.checkpoint import load_config
from variants.errors import DeviceError, InputError, UsageError
from variants.model_config import ModelConfig

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
LOADABLE = ("f32", "bf16", "f16")
ATTENTION = ("eager", "sdpa")
EXPERTS = ("grouped_mm", "eager", "batched_mm")
GPU_ONLY = ("fla", "causal_conv1d")

_MODELING = "transformers.models.kimi_linear.modeling_kimi_linear"
_KERNELS = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
_INSTALL = "install it with: pip install 'neartie[transformers]'"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model of the library and where it came from.

    dtype: of its weights now. as_loaded: the dtype that the parameters were rounded to when they were loaded.
    rounded: checkpoint tensors stored as float32 that the library did not keep in float32.
    kernels: the module that each KDA and convolution function was bound to ("unknown" where the library hides it).
    """

    model: Any
    library: ModuleType
    config: ModelConfig
    path: Path
    dtype: str
    as_loaded: str
    device: str
    model_sha256: str
    tokenizer_sha256: str | None
    rounded: tuple[str, ...]
    kernels: dict[str, str]

    def upcast(self, dtype: str, model: Any) -> "LoadedModel":
        """This record for `model`, a copy whose weights are held in `dtype`."""
        return replace(self, model=model, dtype=dtype)


def load_model(path: str | Path, *, dtype: str, attention: str, experts: str, device: str) -> LoadedModel:
    """The checkpoint directory `path`, loaded by the library in evaluation mode.

    dtype: "f32", "bf16" or "f16", the library's rounding of the parameters included. Nothing is ever downloaded.
    Raises UsageError for an unknown option, InputError for a checkpoint that does not fit, DeviceError where the
    library, the device, or a kernel for the device is missing.
    """
    _check_option("dtype", dtype, LOADABLE)
    _check_option("attention", attention, ATTENTION)
    _check_option("experts", experts, EXPERTS)
    _check_device(device)
    path = Path(path)
    config = load_config(path)
    _check_grouped_mm(config, dtype, experts)
    library = modeling(device)
    with quiet():
        model = _from_pretrained(
            library, path, dtype=DTYPES[dtype], attn_implementation=attention, experts_implementation=experts
        )
    model = model.to(device).eval()
    files = weight_files(path)
    return LoadedModel(
        model=model,
        library=library,
        config=config,
        path=path,
        dtype=dtype,
        as_loaded=dtype,
        device=device,
        model_sha256=weights_sha256(files),
        tokenizer_sha256=file_sha256(path / "tokenizer.json") if (path / "tokenizer.json").is_file() else None,
        rounded=_rounded(files, model),
        kernels=bound_kernels(library),
    )


def modeling(device: str) -> ModuleType:
    """The library's Kimi-Linear module, imported with its GPU-only kernels kept out where `device` is a CPU.

    Raises DeviceError where the library is absent, too old, or already bound to a kernel that a CPU cannot run.
    """
    if torch.device(device).type != "cpu":
        return _imported()
    with _kept_out(GPU_ONLY):
        library = _imported()
    _check_cpu_kernels(library)
    return library


def _imported() -> ModuleType:
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise DeviceError(f"the transformers library is not installed; {_INSTALL}") from error
    try:
        return importlib.import_module(_MODELING)
    except ModuleNotFoundError as error:
        if error.name is None or not _MODELING.startswith(error.name):
            raise
        raise DeviceError(f"this transformers library has no Kimi-Linear ({error.name}); {_INSTALL}") from error


def bound_kernels(library: ModuleType) -> dict[str, str]:
    """Which module's code each KDA and convolution function of the library calls, read off the function itself."""
    return {name: _bound_module(getattr(library, name)) for name in _KERNELS}


@contextmanager
def quiet() -> Iterator[None]:
    """The library's warnings and progress bars are off inside; its settings come back on leaving."""
    logging = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory in the order of their names; raises InputError where none is."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise InputError(f"{path}: got no {missing[0]}; expected the safetensors files of a checkpoint")
    return [path / name for name in names]


def weights_sha256(files: list[Path]) -> str:
    """SHA-256 of one file, or, as in `variants.checkpoint`, of the shards' sorted lines "<sha256>  <name>"."""
    if [file.name for file in files] == ["model.safetensors"]:
        return file_sha256(files[0])
    lines = sorted(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _kept_out(packages: tuple[str, ...]) -> Iterator[None]:
    """Imports of `packages` fail inside; what was imported before is back afterwards."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # None is how an import is refused
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)


def _check_cpu_kernels(library: ModuleType) -> None:
    bound = {name: module for name, module in bound_kernels(library).items() if module.split(".")[0] in GPU_ONLY}
    if bound:
        name, module = next(iter(bound.items()))
        raise DeviceError(
            f"transformers was imported before this engine and bound {name} to {module}, which crashes on a CPU; "
            "load this engine first in a new process, or uninstall the package"
        )


def _bound_module(function: Callable[..., Any]) -> str:
    bound = inspect.getclosurevars(function).nonlocals.get("implementation")
    return bound.__module__ if callable(bound) else "unknown"


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"transformers engine, {name}: got {value!r}, expected one of {', '.join(allowed)}")


def _check_grouped_mm(config: ModelConfig, dtype: str, experts: str) -> None:
    """PyTorch's grouped product wants rows of a multiple of 16 bytes and fails in the middle of a pass otherwise."""
    widths = {"hidden_size": config.hidden_size, "moe_intermediate_size": config.moe_intermediate_size}
    for name, width in widths.items():
        if experts == "grouped_mm" and any(config.moe_layers) and width * DTYPES[dtype].itemsize % 16:
            raise UsageError(
                f"transformers engine: experts='grouped_mm' in {dtype} needs {name} in multiples of "
                f"{16 // DTYPES[dtype].itemsize}, got {width}; use experts='eager'"
            )


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise DeviceError(f"device: got {device!r}, expected cpu, cuda or cuda:N") from error
    if kind not in ("cpu", "cuda"):
        raise DeviceError(f"device: got {device!r}, the transformers engine runs on cpu and cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device: got {device!r}, but this torch ({torch.__version__}) sees no CUDA device; use cpu")


def _from_pretrained(library: ModuleType, path: Path, **options: Any) -> Any:
    try:
        model, report = library.KimiLinearForCausalLM.from_pretrained(
            path, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path}: transformers could not load it: {_first_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        if names := report.get(kind):
            # The library itself would fill what is missing with random numbers and go on.
            raise InputError(f"{path}: {kind.replace('_', ' ')}: {len(names)}, the first is {sorted(names)[0]}")
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rounded(files: list[Path], model: Any) -> tuple[str, ...]:
    """Names of the tensors stored as float32 whose parameter is held in fewer bits."""
    kept = {_tail(name) for name, value in model.named_parameters() if value.dtype == torch.float32}
    kept |= {_tail(name) for name, value in model.named_buffers() if value.dtype == torch.float32}
    if all(value.dtype == torch.float32 for value in model.parameters()):
        return ()
    stored: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored += [name for name in tensors.keys() if tensors.get_slice(name).get_dtype() == "F32"]  # noqa: SIM118
    return tuple(sorted(name for name in stored if _tail(name) not in kept))


def _tail(name: str) -> str:
    """The part of a name that the library's renaming keeps: `A_log`, `gate.weight`."""
    owner, _, last = name.rpartition(".")
    return f"{owner.rpartition('.')[2]}.{last}" if last == "weight" else last

"""Where and with what a run was made: enough to tell two environments apart, nothing that names somebody's machine."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from variants.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
CPUINFO = Path("/proc/cpuinfo")
GIT_SECONDS = 20
COMMIT = "NEARTIE_COMMIT"  # set by whoever copies a tree to a machine without its repository
# Variables that change the arithmetic behind torch's back; recorded where they are set.
SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "TRITON_INTERPRET",
)


def environment(*, device: str = "cpu") -> dict[str, object]:
    """The ledger's `environment`, read now, since threads and precision flags can change within a process.

    Versions are text; null stands for what is not there: git outside a checkout, CUDA and its driver without a device,
    `transformers` and `fla` unless this process has imported them. No host name, user name or path is in it.
    """
    import numpy

    return {
        **checkout(),
        **_device(device),
        **_torch(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "triton": _installed("triton"),
        "transformers": _imported("transformers"),
        "fla": _imported("fla"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def checkout(root: Path = ROOT) -> dict[str, object]:
    """`git`: the commit that `root` has checked out; `dirty`: whether anything outside results/ differs from it.

    Untracked files count, since a module need not be committed to be imported. Where `root` is not the top of a
    checkout (a copy on a machine without the repository, say) `git` is what NEARTIE_COMMIT tells, else null, and
    `dirty` null: nobody has looked. UsageError where that is no commit.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"git": _told(), "dirty": None}
    changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)results")
    return {"git": _git(root, "rev-parse", "--verify", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _told() -> str | None:
    told = os.environ.get(COMMIT)
    if told is not None and not re.fullmatch(r"[0-9a-f]{40}", told):
        raise UsageError(f"{COMMIT}={told}: expected the 40 hexadecimal digits of a commit; correct it or unset it")
    return told


def _git(root: Path, *arguments: str) -> str | None:
    # A hook sets GIT_DIR and the like, which would answer for another repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str | None:
    """The CPU's model name as its maker gives it."""
    if CPUINFO.exists():
        name = re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE)
        if name:
            return name[1].strip()
    return platform.processor() or None


def _torch() -> dict[str, object]:
    """Versions and flags of torch. `tf32`: float32 matrix products on CUDA may use it; `conv_tf32`: convolutions."""
    import torch

    cuda = torch.backends.cuda.matmul
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": cuda.fp32_precision == "tf32",
        "conv_tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",  # pyright: ignore[reportAttributeAccessIssue]
        "cpu_matmul_precision": torch.backends.mkldnn.matmul.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
        "bf16_reduced_reduction": cuda.allow_bf16_reduced_precision_reduction,
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def _device(device: str) -> dict[str, object]:
    """`device`: "cpu", or the accelerator's model name; `driver` and `capability` go with an accelerator."""
    if not device.startswith("cuda"):
        return {"device": device, "driver": None, "capability": None}
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return {"device": torch.cuda.get_device_name(device), "driver": _driver(), "capability": f"{major}.{minor}"}


def _driver() -> str | None:
    if not NVIDIA_VERSION.exists():
        return None
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", NVIDIA_VERSION.read_text())
    return version[1] if version else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imported(module: str) -> str | None:
    version = getattr(sys.modules.get(module), "__version__", None)
    return version if isinstance(version, str) else None

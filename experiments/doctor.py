"""`neartie doctor`: what is installed and whether the shipped files are whole; or what one engine offers."""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill

from experiments.words import Flags
from harness.config import Config, EngineKind
from harness.engines import make_engine
from harness.engines.assets import ASSETS, checkpoint_folder
from harness.engines.protocol import Probing
from harness.golden import load_golden
from harness.golden_model import is_made_of
from harness.offers import NOTES, instruments, offers
from harness.text_table import text_table
from variants.checkpoint import load_checkpoint
from variants.errors import DeviceError, EngineError, InputError

NEEDED = ("torch", "numpy", "hydra-core", "omegaconf", "pandas", "pyarrow", "safetensors")
OPTIONAL = ("transformers", "triton", "matplotlib", "pytest", "ruff", "pyright")


def run(config: Config, flags: Flags) -> int:
    """Print each finding; of another engine than ours, what it offers.

    4 where a package or the results folder cannot be used, 3 where a shipped file is broken.
    """
    if config.engine.kind is not EngineKind.local:
        return _engine(config, flags)
    findings = [*_packages(), *_devices(), _results(Path(config.results)), _assets(), _model(config)]
    if flags.json:
        print(json.dumps([dict(zip(("what", "found", "exit_code"), f, strict=True)) for f in findings]))
    else:
        print(
            text_table(
                ("what", "found", ""),
                [[what, found, "" if not code else "NOT USABLE"] for what, found, code in findings],
            )
        )
    return max(code for _, _, code in findings)


def _engine(config: Config, flags: Flags) -> int:
    """One screen on one engine, asked once where it is a server; 5 where it returns no ids."""
    golden = load_golden(config.golden)
    engine = make_engine(config)
    if isinstance(engine, Probing):
        engine.probe(golden.prompts[0])
    info = engine.info
    found, allowed = offers(info), instruments(info, oracle=is_made_of(golden, config.model))
    limits = [*info.limits, *NOTES.get(info.name, ())]
    if flags.json:
        print(json.dumps({"offers": dict(found), "instruments": dict(allowed), "limits": limits}))
    else:
        print(text_table(("offers", ""), found))
        print("\n" + text_table(("instrument", ""), allowed))
        print("".join(f"\n{fill(limit, 100)}" for limit in limits))
    return 0 if info.ids_out else EngineError.exit_code


Finding = tuple[str, str, int]


def _packages() -> list[Finding]:
    findings = [("python", platform.python_version(), 0)]
    for name in (*NEEDED, *OPTIONAL):
        try:
            findings.append((name, version(name), 0))
        except PackageNotFoundError:
            findings.append((name, "not installed", DeviceError.exit_code if name in NEEDED else 0))
    findings.append(("c++", _compiler(), 0))
    if importlib.util.find_spec("fla"):
        findings.append(("fla", "installed; transformers on the cpu cannot run beside it and is kept from it", 0))
    return findings


def _compiler() -> str:
    """What compiles impl native, and inductor on a CPU, by its own words, or that there is none."""
    from variants.ops.native_library import compiler

    try:
        said = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    except DeviceError:
        return "no compiler: impl native, and inductor on the cpu, cannot run"
    return next(iter(said.splitlines()), "it does not say")


def _devices() -> list[Finding]:
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    threads = (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    return [("cpu", threads, 0), *((f"cuda:{i}", name, 0) for i, name in enumerate(cuda)), ("cuda", str(len(cuda)), 0)]


def _results(folder: Path) -> Finding:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    usable = place.is_dir() and os.access(place, os.W_OK)
    return "results", f"{folder}{'' if usable else ' cannot be written'}", 0 if usable else DeviceError.exit_code


def _model(config: Config) -> Finding:
    try:
        loaded = load_checkpoint(checkpoint_folder(config.model.path), expect_sha256=config.model.sha256)
    except InputError as error:
        return "model", str(error), error.exit_code
    return "model", f"{config.model.path} {loaded.sha256[:12]}", 0


def _assets() -> Finding:
    """Every shipped file against assets/SHA256SUMS."""
    lines = (ASSETS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = [line.split("  ", 1) for line in lines]
    broken = [name for digest, name in sums if _sha256(ASSETS / name) != digest]
    found = f"{len(sums)} files whole" if not broken else f"missing or changed: {', '.join(broken)}"
    return "assets", found, InputError.exit_code if broken else 0


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))

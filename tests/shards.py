"""A folder of random shards at the full geometry in fewer layers, and what loading it takes: seconds, memory, rates.

python tests/shards.py write DIR --layers 9 [--device cuda] [--shard-gb 5]
python tests/shards.py load DIR [--device cuda:0,cuda:1] [--variant fast_decode_fused]

The second is a process of its own, so that its peaks are those of the load. It prints one JSON object.
"""

import argparse
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from harness.compose import named_variant
from harness.engines.assets import geometry
from harness.engines.loaded import shared_casts
from variants.checkpoint import load_config
from variants.checkpoint_write import random_checkpoint, write_checkpoint
from variants.model import Model
from variants.recipe import resolve
from variants.weights import Weights

KINDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem")  # all resident pages; heap; mapped files; shared and page-locked


def write(folder: Path, *, layers: int, device: str, shard_bytes: int) -> dict[str, float]:
    """Draw the first layers of the 48B geometry, a dense one and experts, and write them in shards."""
    full = load_config(geometry("kimi_linear_48b"))
    config = replace(full, layer_kinds=full.layer_kinds[:layers], moe_layers=full.moe_layers[:layers])
    started = time.perf_counter()
    write_checkpoint(random_checkpoint(config, seed=1, device=device), folder, max_shard_bytes=shard_bytes)
    return {
        "bytes": size(folder),
        "shards": len(list(folder.glob("*.safetensors"))),
        "s": time.perf_counter() - started,
    }


def load(folder: Path, *, devices: list[str], variant: str | None) -> dict[str, object]:
    """Load the folder as a run does, and bind a variant to it; host peaks are told beside what was held before."""
    cuda = [d for d in devices if d.startswith("cuda")]
    for d in cuda:
        torch.zeros(1, device=d)
    before, wall, cpu = resident(), time.perf_counter(), time.process_time()
    with peaks() as peak:
        casts = shared_casts(str(folder), None, *devices)
        told: dict[str, object] = {"load_s": time.perf_counter() - wall, "load_cpu_s": time.process_time() - cpu}
        told["gb_s"] = size(folder) / 1e9 / (time.perf_counter() - wall)
        if variant is not None:
            wall, recipe = time.perf_counter(), resolve(named_variant(variant), casts.checkpoint.config)
            model = Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics))
            told |= {"bind_s": time.perf_counter() - wall, "casts_bytes": casts.nbytes, "variant": variant}
            del model
    told |= {"weights_bytes": sum(t.nbytes for t in casts.checkpoint.tensors.values())}
    told |= {"sha256": casts.checkpoint.sha256, "host_before": before, "host_peak": dict(peak)}
    return told | {"device_peak": {d: torch.cuda.max_memory_allocated(d) for d in cuda}}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def resident() -> dict[str, int]:
    """Resident bytes of this process by kind of page."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {name[:-1]: int(value[0]) * 1024 for name, *value in lines if name[:-1] in KINDS}


@contextmanager
def peaks():
    """The largest of each kind while the block runs, looked at every 10 ms."""
    most, ended = resident(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            for name, value in resident().items():
                most[name] = max(most[name], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shard-gb", type=float, default=5)
    parser.add_argument("--variant")
    given = parser.parse_args()
    if given.what == "write":
        shard_bytes = int(given.shard_gb * 1e9)
        told = write(given.folder, layers=given.layers, device=given.device, shard_bytes=shard_bytes)
    else:
        told = load(given.folder, devices=given.device.split(","), variant=given.variant)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

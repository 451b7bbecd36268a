"""What loading costs in host memory, measured in a fresh process on four shards of about 1 GB."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from variants.checkpoint import Checkpoint, expected_tensors
from variants.checkpoint_names import is_float32_parameter
from variants.checkpoint_write import write_checkpoint
from variants.model_config import LayerKind, ModelConfig

LARGE = ModelConfig(
    vocab_size=65536,
    hidden_size=1024,
    rms_norm_eps=1e-5,
    layer_kinds=(LayerKind.kda, LayerKind.kda, LayerKind.kda, LayerKind.mla),
    moe_layers=(False, True, True, True),
    intermediate_size=8192,
    kda_num_heads=8,
    kda_head_dim=128,
    kda_v_head_dim=128,
    conv_size=4,
    num_heads=8,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=32,
    experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.446,
    renormalize=True,
    tie_word_embeddings=False,
    max_length=4096,
)

# VmHWM is the peak of this process image alone; ru_maxrss would begin at the parent's size.
MEASURE = """
import json, sys
from pathlib import Path
from variants.checkpoint import load_checkpoint
from variants.placement import one

def resident_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

path, device, loads, held = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), []
before, growth = resident_bytes("VmRSS"), []
if sys.argv[4] == "whole-files":
    held = [file.read_bytes() for file in path.glob("*.safetensors")]
for _ in range(loads):
    checkpoint = load_checkpoint(path, placement=one(device))
    growth.append(resident_bytes("VmHWM") - before)
    del checkpoint
print(json.dumps(growth))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int]]:
    """Four shards of constant weights: their directory, all bytes and the bytes of the largest tensor."""
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.float32 if is_float32_parameter(name) else torch.bfloat16)
        for name, shape in expected_tensors(LARGE).items()
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    directory = tmp_path_factory.mktemp("large")
    checkpoint = Checkpoint(path=directory, config=LARGE, tensors=tensors, sha256="")
    write_checkpoint(checkpoint, directory, max_shard_bytes=int(sum(sizes) / 3.7))
    del tensors, checkpoint
    assert len(list(directory.glob("*.safetensors"))) == 4
    assert sum(sizes) > 0.95e9
    yield directory, sum(sizes), max(sizes)
    shutil.rmtree(directory)


def peak_growth(directory: Path, *, device: str = "cpu", loads: int = 1, mode: str = "stream") -> list[int]:
    """Peak resident growth in bytes after each of some loads in one new process."""
    arguments = [sys.executable, "-c", MEASURE, str(directory), device, str(loads), mode]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return json.loads(ran.stdout)


def test_loading_takes_the_weights_and_little_more(large: tuple[Path, int, int]) -> None:
    """P45: the peak is under 1.3 x the weights, and a third load after two that were dropped adds under 5 %."""
    directory, weights, _ = large
    first, _, third = peak_growth(directory, loads=3)
    assert 0.95 * weights < first < 1.3 * weights
    assert third < 1.05 * first


def test_the_measure_sees_files_that_are_held(large: tuple[Path, int, int]) -> None:
    """A loader that kept its files' bytes beside the tensors would be caught: the measure then shows both."""
    directory, weights, _ = large
    (peak,) = peak_growth(directory, mode="whole-files")
    assert peak > 1.9 * weights


def test_loading_to_another_device_takes_less_than_one_tensor(large: tuple[Path, int, int]) -> None:
    """Where the weights end elsewhere (here on a device without storage), the host never holds a large tensor whole."""
    directory, _, largest = large
    (peak,) = peak_growth(directory, device="meta")
    assert peak < largest

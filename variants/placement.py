"""Which device holds which layer: a model whose weights do not fit one device runs its layers over several, in turn."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import torch

from variants.checkpoint_names import EMBEDDING, expected_tensors
from variants.errors import UsageError
from variants.model_config import ModelConfig


@dataclass(frozen=True)
class Placement:
    """Stages of consecutive layers, one a device; the embedding lies with the first, last norm and head with the last.

    devices: by stage. starts: the first layer of each stage.
    """

    devices: tuple[str, ...]
    starts: tuple[int, ...]

    def at(self, layer: int) -> str:
        """The device of a layer; -1 is the embedding, and whatever comes after the layers is with the last."""
        return self.devices[max(sum(start <= layer for start in self.starts) - 1, 0)]

    def of(self, name: str) -> str:
        """The device of a tensor, by its release name."""
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            return self.at(int(parts[2]))
        return self.devices[0] if name == EMBEDDING else self.devices[-1]

    def stages(self, layers: int) -> list[tuple[str, range]]:
        """Device and layers of each stage."""
        ends = (*self.starts[1:], layers)
        return [(d, range(a, b)) for d, a, b in zip(self.devices, self.starts, ends, strict=True)]


def one(device: str) -> Placement:
    """Everything on one device."""
    return Placement((device,), (0,))


def spread(config: ModelConfig, devices: Sequence[str]) -> Placement:
    """Layers over devices in order, so that each holds about the same number of weights.

    Raises UsageError for more devices than layers.
    """
    if len(devices) > config.num_layers:
        raise UsageError(
            f"device.pipeline={len(devices)}: the model has {config.num_layers} layers; take fewer devices"
        )
    weights = [0] * (config.num_layers + 2)  # embedding, layers, last norm and head
    for name, shape in expected_tensors(config).items():
        parts = name.split(".")
        layer = int(parts[2]) if parts[:2] == ["model", "layers"] else -1 if name == EMBEDDING else config.num_layers
        weights[layer + 1] += prod(shape)
    share, starts, held = sum(weights) / len(devices), [0], weights[0]
    for layer in range(config.num_layers):
        left = len(devices) - len(starts)
        full = held + weights[layer + 1] / 2 > share * len(starts)
        if layer and left and (full or config.num_layers - layer == left):
            starts.append(layer)
        held += weights[layer + 1]
    return Placement(tuple(devices), tuple(starts))


def current(device: str) -> AbstractContextManager[object]:
    """What makes a device the one that kernels are launched on, for as long as the block runs."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()

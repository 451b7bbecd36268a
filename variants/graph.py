"""A list of launches captured once as a CUDA graph and replayed, so that the host's launches cost nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def captured(
    launch: Callable[[], None], changed: Sequence[Tensor], device: str | torch.device | None = None
) -> Callable[[], None]:
    """Capture `launch` on a device, that of the tensors that it changes; returns what replays it.

    It runs once before, for kernels compile at their first launch; `changed` is put back as it was.
    """
    device = changed[0].device if device is None else device
    before = [x.clone() for x in changed]
    with torch.cuda.device(device):
        launch()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        torch.cuda.synchronize(device)
    for x, old in zip(changed, before, strict=True):
        x.copy_(old)
    return graph.replay

"""What must stand before a test module is imported, and the fixture that poisons unwritten memory.

One thread for every test: the model is small, and threads that wait for each other cost more than they do.
"""

import os

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import torch  # noqa: E402 (reads the number of threads when it is imported)

if not torch.cuda.is_available():  # Triton decides when it is first imported whether its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of sizes that only a GPU reaches are skipped without one, even where they are asked for."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that torch.empty gives is full of NaN, so that an element which is never written is seen."""
    real, real_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan")) if x.dtype.is_floating_point else x.fill_(1 << 30)

    monkeypatch.setattr(torch, "empty", lambda *size, **more: poison(real(*size, **more)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **more: poison(real_like(x, **more)))

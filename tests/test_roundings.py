"""A rounding that cuts errs by less than local replay forbids; the share of values beyond half a unit shows it."""

import pytest
import torch
from instruments import engine as shipped_engine
from instruments import shipped
from torch import Tensor

from harness.compose import groups, named_variant
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.golden import load_golden
from harness.roundings import INSTRUMENT, LIMIT, Roundings, roundings
from harness.verdict import Finding
from variants import dtypes, layers, rounding
from variants.axes import Impl
from variants.dtypes import DType

Monkey = pytest.MonkeyPatch
BATTERY = Battery.of(load_golden("gate"))
TORCH = sorted(n for n in groups()["variant"] if named_variant(n).impl.all_are(Impl.torch))


def asked(name: str) -> Roundings:
    return roundings(LocalEngine(shipped(), named_variant(name), name=name), BATTERY)


def cut(x: Tensor) -> Tensor:
    """float32 to bfloat16's values, towards zero."""
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)


def only(found: Roundings) -> Finding:
    (finding,) = found.findings()
    assert finding.instrument == INSTRUMENT
    assert found.largest > LIMIT
    return finding


@pytest.mark.parametrize("name", TORCH)
def test_a_sound_variant_rounds_to_the_nearest(name: str) -> None:
    """Every variant that torch computes: no place has one value in a hundred beyond half a unit."""
    found = asked(name)
    assert found.findings() == []
    assert found.largest < 0.01


def test_places_that_round_are_looked_at() -> None:
    assert asked("f32").places == 0
    found = asked("bf16_stream")
    assert found.places > 60
    assert found.record() == {"places": found.places, "largest": 0.0}


def test_a_store_that_cuts_is_found(monkeypatch: Monkey) -> None:
    """Everywhere alike, so that a watched twin cuts too; the first place that rounds is told."""

    def store(x: Tensor, dtype: DType) -> Tensor:
        return dtypes.store_as(cut(x) if dtype is DType.bf16 and x.dtype is torch.float32 else x, dtype)

    monkeypatch.setattr(rounding, "store_as", store)
    finding = only(asked("bf16_stream"))
    assert (finding.site, finding.layer) == ("input_norm", 0)
    assert "not rounded to the nearest" in finding.reason


def test_one_site_that_cuts_by_itself_is_found(monkeypatch: Monkey) -> None:
    """The site's own line cuts before the value reaches its rounding, which then has nothing left to round."""
    normalize = layers.Norm._normalize

    def cuts(self: layers.Norm, stored: Tensor, unrounded: Tensor) -> Tensor:
        y = normalize(self, stored, unrounded)
        return cut(y) if y.dtype is torch.float32 else y

    monkeypatch.setattr(layers.Norm, "_normalize", cuts)
    finding = only(asked("bf16_stream"))
    assert (finding.site, finding.layer) == ("input_norm", 0)


def test_a_rounding_that_adds_noise_is_found(monkeypatch: Monkey) -> None:
    """Stochastic rounding, up or down by chance, is no rounding to the nearest either."""
    random = torch.Generator().manual_seed(0)

    def store(x: Tensor, dtype: DType) -> Tensor:
        if dtype is not DType.bf16 or x.dtype is not torch.float32:
            return dtypes.store_as(x, dtype)
        noise = torch.randint(0, 0x10000, x.shape, generator=random, dtype=torch.int32)
        return (x.contiguous().view(torch.int32) + noise & ~0xFFFF).view(torch.float32).to(torch.bfloat16)

    monkeypatch.setattr(rounding, "store_as", store)
    assert only(asked("bf16_stream")).layer == 0


def test_a_short_battery_is_enough() -> None:
    """The longest prompt where none has sixteen tokens."""
    short = Battery(prompts=[[5, 6, 7], [8, 9]], continuations=[[1, 2], [3, 4]])
    found = roundings(shipped_engine("bf16_stream"), short)
    assert found.findings() == []
    assert found.places > 60

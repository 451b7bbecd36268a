"""What a float32 product loses here: shapes are the checkpoint's, and the figure is the library's own error."""

import math

import pytest
import tiny
import torch

from harness.compose import named_variant
from harness.product_error import _measured, product_units, shape_of
from variants.model_config import LayerKind
from variants.recipe import resolve
from variants.sites import places

LATENT = ("q_latent", "o_latent")


def test_every_products_shape_is_its_weights() -> None:
    """Over all layers the products' weights have as many elements as the checkpoint's matrices, experts counted."""
    config = tiny.casts().checkpoint.config
    total = 0
    for site, layer in places(config):
        try:
            shape = shape_of(site, layer, config)
        except KeyError:
            assert not site.endswith(("_proj", "_down", "_up", "lm_head")), site
            continue
        if site in LATENT:
            continue
        total += math.prod(shape) * (config.num_experts if site.startswith("expert") else 1)
    tensors = tiny.casts().checkpoint.tensors.items()
    left_out = ("embed_tokens", "conv1d", "A_log", "norm")
    assert total == sum(t.numel() for n, t in tensors if t.dim() > 1 and not any(x in n for x in left_out))
    assert LayerKind.mla in config.layer_kinds


def test_the_figure_is_the_librarys_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between storing a sum and losing every digit of its terms; a library that loses 100 units is seen to."""
    good = product_units((64, 256), 7)
    assert 0.3 < good < 16
    assert good == product_units((64, 256), 8)
    plain = torch.nn.functional.linear

    def worse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = plain(x, weight)
        lost = 100 * 2.0**-24 * y.pow(2).mean().sqrt() if x.dtype is torch.float32 else 0.0
        return y + lost

    monkeypatch.setattr(torch.nn.functional, "linear", worse)
    _measured.cache_clear()
    assert product_units((64, 256), 8) == pytest.approx(100, rel=0.05)
    _measured.cache_clear()


def test_the_figure_is_of_the_products_own_maker() -> None:
    """Our kernels' is measured with them, at one row; of a weight by columns where it lies so."""
    rule = resolve(named_variant("f32_native"), tiny.ODD).rule("q_proj", 0, "decode")
    ours = product_units((64, 256), 1, rule=rule)
    assert 0.3 < ours < 4  # sixteen lanes of sixteen terms each
    assert ours == product_units((64, 256), 700, rule=rule)
    taken: list[tuple[int, ...]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taken.append(weight.stride())
        return torch.matmul(x, weight.t())

    columns = resolve(named_variant("f32_fast"), tiny.ODD).rule("q_proj", 0, "decode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        _measured.cache_clear()
        product_units((64, 24), 1, rule=columns)
        product_units((24, 64), 1, rule=columns)  # as `Casts.by_columns`: more rows than columns, or it stays
    _measured.cache_clear()
    assert set(taken[: len(taken) // 2]) & {(1, 64)}
    assert (64, 1) in taken

"""Floors of a fused step: bytes from the config are those of the tensors; what differs is not timed; the refusals."""

from dataclasses import replace

import pytest
import torch
from tiny import ODD, SMALL, casts

from experiments.cli import main
from harness.compose import named_variant
from harness.device_timing import Ceilings, Timed, bytes_a_token, bytes_by_kind
from harness.engines.assets import geometry
from harness.engines.local import LocalEngine
from harness.floors import Floors, _same
from harness.roofline_plot import prefill_work, roofline
from variants import decode
from variants.checkpoint_config import load_config
from variants.checkpoint_names import expected_tensors
from variants.checkpoint_write import random_checkpoint
from variants.errors import EngineError
from variants.fused import FusedStep
from variants.model import Model
from variants.model_config import LayerKind
from variants.recipe import resolve
from variants.side_by_side import beside, groups, joined, stacked
from variants.weights import Casts, Weights

FULL = load_config(geometry("kimi_linear_48b"))


def test_the_floors_are_the_bytes_of_the_weights_that_a_launch_reads() -> None:
    """Over one layer of each kind at the full geometry, weights that have shapes alone."""
    config = replace(FULL, layer_kinds=(LayerKind.kda, LayerKind.mla), moe_layers=(False, True), num_experts=16)
    made = Casts(random_checkpoint(config, seed=0, device="meta"), device="meta")
    recipe = resolve(named_variant("fast_decode"), config)
    model = Model(config, recipe, Weights(made, recipe.semantics))
    step, floors = FusedStep.of(model, model.new_state(slots=1, max_len=64), 0), bytes_by_kind(config, 0)
    read = {launch.name: launch.operands for launch in step.launches}
    for name, at in {"kda_project": 2, "mla_project": 2, "dense_up": 2, "dense_down": 2, "router": 2, "lm_head": 2,
                     "kda_out": 2, "mla_out": 2}.items():  # fmt: skip
        assert read[name][at].nbytes == floors[name], name
    assert read["kda_gates"][1].nbytes + read["kda_gates"][2].nbytes == floors["kda_gates"]
    assert 2 * read["kda_core"][7].nbytes == floors["kda_core"]
    share = config.experts_per_token / config.num_experts
    assert read["experts_up"][1].nbytes * share + read["experts_up"][4].nbytes == floors["experts_up"]
    assert read["experts_down"][1].nbytes * share == floors["experts_down"]
    assert set(floors) == set(read)


def test_a_token_of_the_48b_geometry_reads_what_the_campaign_counted() -> None:
    """49.1 G parameters; 6.30 GB a token, and each key of the context adds its latent in seven layers."""
    assert sum(torch.Size(s).numel() for s in expected_tensors(FULL).values()) == pytest.approx(49.1e9, rel=1e-3)
    assert bytes_a_token(FULL, 0) == pytest.approx(6.30e9, rel=1e-3)
    assert bytes_a_token(FULL, 1000) - bytes_a_token(FULL, 0) == 7 * 1000 * 2 * 576


def test_what_is_read_together_lies_together() -> None:
    """Joining neighbours copies nothing; tensors apart, or in another order, are copied to the same values."""
    made = random_checkpoint(ODD, seed=3)
    for names in groups(ODD, made.tensors):
        parts = [made.tensors[n] for n in names]
        assert beside(parts)
        assert joined(parts).data_ptr() == parts[0].data_ptr()
        assert torch.equal(joined(parts), torch.cat(parts))
    a, b = made.tensors["model.layers.0.mlp.gate_proj.weight"], made.tensors["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(joined([b, a]), torch.cat([b, a]))
    assert torch.equal(stacked([a, b]), torch.stack([a, b]))
    assert stacked([a, b]).data_ptr() == a.data_ptr()
    assert stacked([b, a]).data_ptr() not in (a.data_ptr(), b.data_ptr())


def test_nothing_is_timed_while_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison ends at the first token whose logits differ, or are not finite."""
    engine = LocalEngine(casts(SMALL), named_variant("fast_decode_fused"), name="fused")
    logits = torch.ones(1, SMALL.vocab_size)
    for answers in ([logits, logits + 2**-20], [logits / 0, logits / 0]):
        left = list(answers)
        monkeypatch.setattr(decode, "prefill", lambda *_, left=left: left.pop(0))
        with pytest.raises(EngineError, match=r"token 0: .* not timed"):
            _same(engine, [1, 2], 2, longest=8)


def test_the_roofline_shows_every_launch_and_prefill() -> None:
    """Operations of a prompt grow with its tokens, and its bytes end at all the experts'."""
    work = {n: prefill_work(FULL, n) for n in (64, 512, 4096)}
    assert work[64][0] < work[512][0] < work[4096][0]
    assert work[4096][1] == pytest.approx(2 * 49.1e9 - 2 * FULL.vocab_size * FULL.hidden_size, rel=0.01)
    t = Timed(2.0, 1.9, 2.1, 5)
    rows = [{"launch": "a", "count": 1, "us": 2.0, "floor_us": 1.0, "share": 0.5},
            {"launch": "b", "count": 1, "us": 2.0, "floor_us": 0.0, "share": 0.0}]  # fmt: skip
    found = Floors(4, {32: t}, {64: t, 512: t}, rows, Ceilings(4200.0, 4300.0, 800.0), {32: 6_300_000_000}, 98, 99)
    (axes,) = roofline(found, FULL).axes
    assert len(axes.collections) == 3
    assert found.rate(32) == pytest.approx(500)
    assert found.floor_ms(32) == pytest.approx(6.3 / 4.3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["against=floors", "variant=fast_decode"], "set device=cuda"),
        (["against=floors", "variant=f32", "device=cuda"], "a fused step (variant=fast_decode) or the paged runner"),
        (["against=floors", "variant=fast_decode", "device=cuda", "batches=[2]"], "choose variant=paged_engine"),
        (["against=floors", "variant=paged_engine"], "set device=cuda"),
        (["against=floors", "engine=vllm"], "choose model=kimi_linear_48b"),
        (["engine=vllm"], "name it by against="),
        (["contexts=[3]"], "contexts, prefills and batches are read by against=floors alone"),
        (["batches=[3]"], "contexts, prefills and batches are read by against=floors alone"),
        (["against=floors", "prefills=[0]"], "expected numbers of 1 or more"),
        (["against=floors", "contexts=[]"], "expected numbers of 1 or more"),
    ],
)
def test_bench_refuses_floors_that_it_cannot_time(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, before anything is loaded."""
    assert main(["bench", *words]) == 2
    assert why in capsys.readouterr().err

"""Cases from practice beside the kernels, at their own sizes: batches, fixtures, goldens, jobs and records."""

import math
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tiny
from instruments import battery, findings, planted, replay, shipped

from experiments.cli import main
from harness.compose import named_variant
from harness.engines.local import LocalEngine
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.gaps import top2_gaps
from harness.gate import run_gate
from harness.golden import Golden, load_golden, write_golden
from harness.ledger import Ledger
from harness.ledger_view import mean_of
from harness.observe import Observed
from harness.rebless import rebless
from harness.sampling import plain_greedy_settings
from harness.token_text import token_text
from harness.verdict import RunClass, conclude
from variants.defects_kinds import Severity
from variants.errors import EngineError

TOKENIZER = Path(__file__).parents[1] / "assets" / "kimi-linear-12m" / "tokenizer.json"


def golden(tokens: object, **fields: object) -> Golden:
    runs = np.asarray(tokens, dtype=np.int32)
    given = {"name": "tiny", "prompts": tuple((1, 5 + n) for n in range(runs.shape[1])), "tokens": runs, **fields}
    return Golden(**{"sampling": plain_greedy_settings(), **given})  # pyright: ignore[reportArgumentType]


class Recited:
    """An engine of another tokenizer that says given tokens."""

    info = EngineInfo(name="recited", version="1", device="cpu", dtype="f32", tokenizer_sha256="c" * 64)

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        shape = self.tokens.shape
        return Generation(
            tokens=self.tokens, finite=np.ones(shape, bool), gaps=np.full(shape, np.nan),
            prefill_s=np.full(shape[0], np.nan), prefill_tokens=np.full(shape[0], 1), decode_s=(),
        )  # fmt: skip

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        raise AssertionError("a gate asks for tokens only")


# --- P21: batched greedy differs from one at a time ---


def test_p21_in_f32_batches_of_1_4_and_8_agree_in_128_of_128() -> None:
    """The whole gate battery, free-running: float32 alone, by four and by eight chooses the same tokens."""
    gate, variant = load_golden("gate"), named_variant("f32")
    engines = {
        n: LocalEngine(shipped(), replace(variant, execution=replace(variant.execution, batch=n)), name="f32")
        for n in (1, 4, 8)
    }
    alone = replace(gate, tokens=engines[1].generate(gate.prompts, 16).tokens[None], top_ids=None, top_logprobs=None)
    for n in (4, 8):
        agreement = run_gate(alone, engines[n]).agreement
        assert (agreement.matched, agreement.total) == (128, 128)


def test_p21_two_classes_stand_side_by_side() -> None:
    """Of one battery the sound bf16 run is ROUNDING, and the run with a NaN row is INVALID and says where from."""
    config = shipped().checkpoint.config
    sound, broken = (
        findings(replay(p, over=battery((0,), 2))) for p in (None, planted("nan_in_attention", Severity.heavy))
    )
    assert conclude(sound, [], invalid=None, bar_met=False, config=config).run_class is RunClass.rounding
    bad = conclude(broken, [], invalid="non-finite logits, first at prompt 0, step 0", bar_met=None, config=config)
    assert (bad.run_class, bad.site, bad.layer) == (RunClass.invalid, "mla_core", 7)


# --- P26: an untrained model as the fixture ---


@pytest.mark.parametrize(("deviation", "median"), [(0.5, 0.075), (1.0, 0.16), (3.0, 0.57)])
def test_p26_the_median_gap_of_random_logits_is_a_sixth_of_their_deviation(deviation: float, median: float) -> None:
    """At 32,000 ids about 0.075, 0.16 and 0.57 nats, to the spread of the case's own draws."""
    random = np.random.default_rng(1)
    top = np.sort(np.partition(random.standard_normal((300, 32_000), dtype=np.float32), -2)[:, -2:])[None, :, ::-1]
    ids = np.tile(np.array([1, 2], np.int32), (1, 300, 1))
    fixture = golden(np.ones((1, 1, 300)), top_ids=ids, top_logprobs=top.astype(np.float64) * deviation - 20)
    gaps = top2_gaps(fixture)
    assert gaps is not None
    assert float(np.median(gaps)) == pytest.approx(median, rel=0.25)


# --- P32: another tokenizer, Han text and reserved ids ---


def test_p32_han_latin_and_reserved_ids_are_kept_as_ids_and_text_is_ignored(tmp_path: Path) -> None:
    """Ids of a mixed text and one past the vocabulary survive the file; under another tokenizer no text is shown."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = tokenizers.Tokenizer.from_str(TOKENIZER.read_text(encoding="utf-8")).encode("月之暗面 Kimi").ids
    reserved = 163_839
    text = token_text(TOKENIZER)
    assert text is not None
    assert all(text(i) for i in ids)
    assert text(reserved) is None
    made = golden([[[7, reserved]]], prompts=((*ids, reserved),), provenance={"tokenizer_sha256": "a" * 64})
    read = load_golden(write_golden(made, tmp_path / "han").path or "")
    assert (read.prompts, read.tokens.tolist()) == (((*ids, reserved),), [[[7, reserved]]])
    for known, said in (("a" * 64, None), ("c" * 64, text(9))):
        result = run_gate(replace(read, provenance={"tokenizer_sha256": known}), Recited(np.array([[9, 9]])), text=text)
        (divergence,) = result.agreement.first_divergence
        assert (divergence.golden_id, divergence.candidate_id, divergence.candidate_text) == (7, 9, said)
        assert any("ids alone are compared, text was ignored" in note for note in result.notes) is (said is None)


# --- P33: goldens go stale ---


def test_p33_a_new_golden_says_when_and_what_the_comparison_showed(tmp_path: Path) -> None:
    """The record holds the moment in UTC and the words of the A/B, beside both stamps."""
    old = write_golden(golden([[[1, 2]]], provenance={"torch": "2.11.0"}), tmp_path / "g")
    here = {"torch": "2.13.0"}
    new = rebless(
        old,
        replace(old, tokens=np.array([[[1, 3]]])),
        who="ann",
        why="torch moved",
        environment=here,
        compared="both give 3",
    )
    (record,) = new.provenance["blessed"]
    when = datetime.fromisoformat(record["when"])
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(when.tzinfo) - when) < timedelta(minutes=1)
    assert record["compared"] == "both give 3"
    assert (record["environment_before"], record["environment_after"]) == ({"torch": "2.11.0"}, here)


# --- P35: failing jobs of a multirun ---


def test_p35_each_job_of_a_multirun_leaves_its_row_and_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """x = 1, 2, 3, 4 where 2 raises and 3 calls sys.exit(7): 4 still runs, four rows, both failures in the summary."""
    errors = {2: RuntimeError("boom"), 3: SystemExit(7)}
    generate = LocalEngine.generate

    def failing(self: LocalEngine, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        if max_tokens in errors:
            raise errors[max_tokens]
        return generate(self, prompts, max_tokens, stop_at_eos=stop_at_eos)

    monkeypatch.setattr(LocalEngine, "generate", failing)
    monkeypatch.setattr(LocalEngine, "observed", lambda *_: Observed({}, ()))  # nothing to wait for
    words = ["variant=f32", "limit=1", "max_tokens=1,2,3,4", f"results={tmp_path}"]
    assert main(["gate", "-m", *words]) == 6
    rows = Ledger(tmp_path / "ledger").rows()
    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "ok"]
    assert [row["detail"]["config"]["max_tokens"] for row in rows] == [1, 2, 3, 4]
    assert "boom" in rows[1]["error"]
    assert "SystemExit" in rows[2]["error"]
    said = capsys.readouterr().err
    assert "2 of 4 jobs failed, 0 not started" in said
    assert "boom" in said
    assert "SystemExit: 7" in said


# --- P40: NaN in stored metrics ---


def test_p40_a_failed_row_with_nan_still_counts_as_failed(tmp_path: Path) -> None:
    """gap = NaN and kl = inf are null with their reasons in a row that stays failed, and its mean stays NaN."""
    ledger = Ledger(tmp_path)
    with pytest.raises(ValueError, match="broken"), ledger.begin({"expected": {"mean": math.nan}}) as run:  # noqa: PT012
        run.add({"detail": {"gap": math.nan, "kl": math.inf}})
        raise ValueError("broken")
    (row,) = ledger.rows()
    assert (row["status"], row["detail"]["gap"], row["detail"]["kl"]) == ("failed", None, None)
    assert row["nulls"] == {"/expected/mean": "nan", "/detail/gap": "nan", "/detail/kl": "inf"}
    assert math.isnan(mean_of([row], "expected.mean") or 0.0)


def test_logits_that_are_all_equal_at_the_first_step_stop_the_run() -> None:
    """P44: an all-zero head gives no choice at all; the run stops and names it, whatever the golden's first id."""
    casts = tiny.casts()
    casts.checkpoint.tensors["lm_head.weight"].zero_()
    engine = LocalEngine(casts, named_variant("f32"), name="f32")
    with pytest.raises(EngineError, match="all logits equal at step 0"):
        engine.generate([[1, 2, 3]], 2)

"""A capture is K plain greedy runs with all that is known of them; it can be resumed, and replaces with care."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_server import Handler, completion, serving

from experiments.cli import main
from harness.capture import Plan, capture
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.golden import Bar, Golden, load_golden, verify_golden
from harness.journal import Journal
from harness.prompt_files import read_prompts
from variants.errors import EngineError, InputError, UsageError

Captured = pytest.CaptureFixture[str]
SMALL = ["limit=2", "max_tokens=3", "logprobs=4"]
MODEL = Path(__file__).parents[1] / "assets" / "kimi-linear-12m"


class Sayer:
    """Says the tokens of its runs, one run after the other; `failing` names the calls that raise."""

    def __init__(self, runs: Any, *, failing: tuple[int, ...] = (), **info: Any) -> None:
        self.runs, self.failing = np.asarray(runs, np.int32), failing
        given = {"name": "sayer", "version": "1", "device": "cpu", "dtype": "f32", "can_score": False}
        self.info = EngineInfo(**{**given, "sampling": {"temperature": 0.0}, **info})
        self.calls = 0
        self.extra: dict[str, Any] = {}

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        call, self.calls = self.calls, self.calls + 1
        if call in self.failing:
            raise EngineError("gone")
        rows = len(self.runs[0])
        n = [call % rows] if self.info.batch == 1 else list(range(len(prompts)))
        tokens = self.runs[call // rows if self.info.batch == 1 else call][n]
        given = {"finite": np.ones(tokens.shape, bool), "gaps": np.full(tokens.shape, 0.25), **self.extra}
        return Generation(
            tokens=tokens,
            prefill_s=np.full(len(n), np.nan),
            prefill_tokens=np.full(len(n), 2),
            decode_s=(),
            **given,
        )

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        raise AssertionError("it says that it cannot")


PLAN = Plan(
    name="said", prompts=((1, 5), (1, 6)), texts=None, runs=3, max_tokens=3, stop_at_eos=False, top_k=4
)  # fmt: skip
SAME = [[[7, 8, 9], [4, 5, 6]]] * 3


def captured(engine: Sayer, folder: Path, plan: Plan = PLAN) -> Golden:
    return capture(engine, plan, journal=Journal(folder, {"t": 1}), made={"environment": {"torch": "x"}})


def test_runs_decide_the_bar_and_their_distance_is_recorded(tmp_path: Path) -> None:
    """Identical runs make a STRICT golden; one token that differs a DISTRIBUTIONAL one, with its place and gap."""
    golden = captured(Sayer(SAME), tmp_path / "a")
    assert (golden.bar, [j["differ"] for j in golden.provenance["jitter"]]) == (Bar.STRICT, [0, 0])
    assert golden.sampling == {"temperature": 0.0, "read_back": True, "eos": "ignored"}
    assert golden.plain_greedy
    assert golden.provenance["environment"] == {"torch": "x"}
    assert "margins and gaps are unknown" in golden.provenance["notes"][0]
    other = [SAME[0], SAME[0], [[7, 8, 9], [4, 1, 6]]]
    golden = captured(Sayer(other), tmp_path / "b")
    assert golden.bar is Bar.DISTRIBUTIONAL
    (first, second) = golden.provenance["jitter"]
    assert (first["differ"], second["differ"], second["first"], second["gap_nats"]) == (0, 1, [1, 1], 0.25)


def test_rows_that_run_together_are_asked_together(tmp_path: Path) -> None:
    """An engine of two rows gets both prompts in one call a run."""
    engine = Sayer(SAME, batch=2)
    captured(engine, tmp_path)
    assert engine.calls == 3


def test_a_capture_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The fourth call fails: three are kept, and the next attempt asks for the other three alone."""
    with pytest.raises(EngineError, match="gone"):
        captured(Sayer(SAME, failing=(3,)), tmp_path)
    again = Sayer(SAME)
    again.calls = 3
    golden = captured(again, tmp_path)
    assert again.calls == 6
    assert golden.tokens.tolist() == SAME


@pytest.mark.parametrize(
    ("info", "extra", "said"),
    [
        ({"sampling": {"temperature": 0.7}}, {}, "not plain greedy .temperature 0.7"),
        ({"sampling": {}}, {}, "sampling settings are not recorded"),
        ({}, {"sampling": {"temperature": 0.0, "repeat_penalty": 1.1}}, "repeat_penalty 1.1"),
        ({}, {"prompt_ids": [[1, 1, 5]]}, "double BOS"),
        ({}, {"finite": np.zeros((1, 3), bool)}, "run 0: non-finite logits at prompt 0, step 0"),
    ],
)
def test_what_is_not_plain_greedy_is_no_golden(
    info: dict[str, Any], extra: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Settings read off the engine or off its answers, other ids, NaN: refused."""
    engine = Sayer(SAME, **info)
    engine.extra = extra
    plan = replace(PLAN, prompts=PLAN.prompts[:1]) if "prompt_ids" in extra else PLAN
    with pytest.raises((InputError, EngineError), match=said):
        captured(engine, tmp_path, plan)


def test_a_variant_captures_itself(tmp_path: Path, capsys: Captured) -> None:
    """From the command line: K = 2, logprobs of the decode path, rows together as an arm; the gate then passes."""
    out = tmp_path / "mine"
    words = ["variant=f32", f"golden={out}", "runs=2", *SMALL, f"results={tmp_path}"]
    assert main(["capture", *words]) == 0
    said = capsys.readouterr().out
    assert "K = 2, bar STRICT, 4 logprobs a token" in said
    assert "4 rows together: identical" in said
    golden = load_golden(out.with_suffix(".json"))
    assert golden.top_logprobs is not None
    assert golden.texts == load_golden("gate").texts[:2]  # type: ignore[index]
    assert verify_golden(out.with_suffix(".json")) == []
    assert golden.provenance["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert main(["gate", "--require=strict", "variant=f32", f"golden={golden.path}", f"results={tmp_path}"]) == 0
    assert not list((tmp_path / "unfinished").glob("*"))


def test_a_golden_is_replaced_with_a_reason_and_kept(tmp_path: Path, capsys: Captured) -> None:
    """P33, P34: without --why nothing is written; with it the old one stays readable and the record says why."""
    out = tmp_path / "mine"
    words = ["capture", "variant=f32", f"golden={out}", "runs=2", *SMALL, f"results={tmp_path}"]
    assert main([*words, "--why=early"]) == 2
    assert main(words) == 0
    first = load_golden(out.with_suffix(".json"))
    assert main(words) == 3
    assert "exists; to replace it" in capsys.readouterr().err
    words[1] = "variant=bf16_stream"
    assert main([*words, "--why", "the stream is bf16 now", "--who=ann"]) == 0
    new = load_golden(out.with_suffix(".json"))
    (blessed,) = new.provenance["blessed"]
    assert (blessed["who"], blessed["why"], blessed["replaced"]) == ("ann", "the stream is bf16 now", first.hash)
    assert load_golden(tmp_path / f"mine-{first.hash[:12]}.json").hash == first.hash
    assert f"kept as mine-{first.hash[:12]}.json" in capsys.readouterr().out


def test_a_moved_environment_names_the_command_and_waits_for_the_comparison(tmp_path: Path, capsys: Captured) -> None:
    """P33: the gate says what moved and how to re-bless; the capture asks what comparing showed."""
    out = tmp_path / "mine"
    words = ["capture", "variant=f32", f"golden={out}", "runs=2", *SMALL, f"results={tmp_path}"]
    assert main(words) == 0
    file = out.with_suffix(".json")
    described = json.loads(file.read_text())
    described["environment"]["torch"] = "2.11.0"
    file.write_text(json.dumps(described))
    capsys.readouterr()
    assert main(["gate", "variant=f32", f"golden={file}", f"results={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "environment differs: compare old and new code here first" in said
    assert f"neartie capture golden={file} engine=... --why=REASON --compared=WORDS" in said
    assert main([*words, "--why=torch moved"]) == 3
    assert "--compared" in capsys.readouterr().err
    assert main([*words, "--why=torch moved", "--compared=both commits give the same tokens"]) == 0
    assert load_golden(file).provenance["blessed"][0]["environment_before"]["torch"] == "2.11.0"


def test_a_server_is_captured_and_a_killed_one_is_resumed(tmp_path: Path, capsys: Captured) -> None:
    """K runs through HTTP with its arms; after a failure the same command asks for what is missing alone."""
    gate = load_golden("gate")
    count = itertools.count()

    def dies(handler: Handler, body: dict[str, Any]) -> bool:
        if next(count) < 5:
            return False
        handler.answer({"error": "dead"}, 503)
        return True

    with serving(gate, dies) as server:
        url = [f"engine.url={server.url}", "engine.dialect=vllm", "engine.retries=0"]
        words = ["capture", "engine=openai", *url, f"golden={tmp_path / 'served'}", "runs=2", "limit=4"]
        assert main([*words, f"results={tmp_path}"]) == 5
        server.misdeed = None
        asked = len(server.asked)
        assert main([*words, f"results={tmp_path}"]) == 0
        assert len(server.asked) - asked == 4 * 4 - 5  # two runs and two arms, five answers of them were kept
    said = capsys.readouterr().out
    assert "4 at a time: identical" in said
    assert "cold prefix cache: identical" in said
    assert "stated, not reported by the engine" in said
    golden = load_golden(tmp_path / "served.json")
    np.testing.assert_array_equal(golden.tokens[1], gate.tokens[0, :4])
    np.testing.assert_array_equal(golden.top_logprobs, gate.top_logprobs[:4])  # type: ignore[index]
    assert server.url not in (tmp_path / "served.json").read_text()


def test_jitter_of_a_server_is_told(tmp_path: Path, capsys: Captured) -> None:
    """A second run that says another token: DISTRIBUTIONAL, with the place."""
    gate = load_golden("gate")
    count = itertools.count()

    def wavers(handler: Handler, body: dict[str, Any]) -> bool:
        whole = completion(gate, body)
        if next(count) == 3:
            (choice,) = whole["choices"]
            choice["token_ids"][2], choice["logprobs"] = 77, None
        handler.answer(whole)
        return True

    with serving(gate, wavers) as server:
        url = [f"engine.url={server.url}", "engine.dialect=vllm", f"results={tmp_path}"]
        assert main(["capture", "engine=openai", *url, f"golden={tmp_path / 's'}", "runs=2", "limit=2"]) == 0
    said = capsys.readouterr().out
    assert "bar DISTRIBUTIONAL" in said
    assert "repeat 1: 1/32 tokens differ in 1 rows, first at p1[2], gaps there up to" in said


def test_prompts_come_from_texts_and_from_ids(tmp_path: Path) -> None:
    """A text becomes the ids that the golden has for it, BOS put before; ids are taken as they are."""
    gate = load_golden("gate")
    assert gate.texts is not None
    (tmp_path / "p.txt").write_text("\n".join(gate.texts[:1]) + "\n\n")
    found = read_prompts(str(tmp_path / "p.txt"), tokenizer=MODEL, bos_id=1)
    assert (found.prompts, found.texts) == (gate.prompts[:1], gate.texts[:1])
    lines = [json.dumps({"prompt_ids": [3, 4]}), json.dumps({"prompt": gate.texts[1]})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    mixed = read_prompts(str(tmp_path / "p.jsonl"), tokenizer=MODEL)
    assert (mixed.prompts, mixed.texts) == (((3, 4), gate.prompts[1][1:]), None)
    assert read_prompts("gate").prompts == gate.prompts
    with pytest.raises(UsageError, match="name their tokenizer"):
        read_prompts(str(tmp_path / "p.txt"))
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1.5]}')
    with pytest.raises(InputError, match="line 1: expected"):
        read_prompts(str(tmp_path / "p.jsonl"))

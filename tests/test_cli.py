"""The command line: help that fits a screen, one clear line for a wrong command, jobs that do not stop each other."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import doctor, gate
from experiments.cli import main
from experiments.commands import available
from experiments.usage import ALSO
from harness.engines.assets import ASSETS
from harness.golden import load_golden, write_golden
from harness.ledger import Ledger

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "assets" / "kimi-linear-12m"
COMMANDS = sorted(available())
Captured = pytest.CaptureFixture[str]


def error_line(captured: Captured) -> str:
    """The one line on stderr; fails where there is another, or a traceback anywhere."""
    out, err = captured.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("neartie: error: ")
    assert "Traceback" not in out + err
    return lines[0]


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_a_screen(argv: list[str], capsys: Captured) -> None:
    """24 lines of 80 columns, with an example; exit code 0."""
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("example: neartie" in line for line in lines)


def test_help_names_every_command(capsys: Captured) -> None:
    """A command that is there is shown, with its summary whole or in the line of the others."""
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {c.name:<9} {c.summary}" in shown for c in available().values() if c.name not in ALSO)
    (also,) = (line for line in shown.splitlines() if line.startswith("  also: "))
    assert also == f"  also: {' '.join(name for name in available() if name in ALSO)}"


def _children_s() -> float:
    """Processor time of the processes that this one has started and seen end."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_help_is_quick_and_imports_no_torch() -> None:
    """`neartie --help`, twice in a new process, takes under 1.5 s of processor time, without torch, pandas or hydra.

    Processor time, since on the clock the tests that run beside this one would be counted too.
    """
    code = (
        "import sys; from experiments.cli import main; main(['--help']); main(['gate', '--help']);"
        "print([m for m in ('torch', 'pandas', 'hydra', 'numpy') if m in sys.modules])"
    )
    began = _children_s()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert _children_s() - began < 1.5
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["experiments.cli", "experiments.gate", "experiments.named"])
def test_modules_run_as_scripts(module: str) -> None:
    """`python -m experiments.gate` is `neartie gate`."""
    argv = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "usage: neartie" in done.stdout


def _another_tokenizer(tmp_path: Path) -> list[str]:
    golden = load_golden("gate")
    tokens = golden.tokens.copy()
    tokens[:, 0, 0] = 150_000
    ids = dict.fromkeys(("top_ids", "top_logprobs"))
    path = write_golden(replace(golden, tokens=tokens, name="kimi", **ids), tmp_path / "kimi.json").path
    return [f"golden={path}"]


def _one_run(tmp_path: Path) -> list[str]:
    return ["golden=wide", "--require"]


def _no_run(tmp_path: Path) -> list[str]:
    shutil.copytree(ROOT / "assets" / "goldens", tmp_path / "goldens")
    path = next((tmp_path / "goldens").glob("*/gate.npz"))
    arrays = dict(np.load(path))
    arrays["token_ids"] = arrays["token_ids"][:0]
    np.savez(path, **arrays)
    return [f"golden={path}"]


def _empty_golden(tmp_path: Path) -> list[str]:
    (tmp_path / "none").mkdir()
    np.save(tmp_path / "none" / "greedy_ids.npy", np.empty((0, 16), dtype=np.int32))
    return [f"golden={tmp_path / 'none'}"]


def _truncated(tmp_path: Path) -> list[str]:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "cut"))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    return [f"model={folder}"]


def _nan_weights(tmp_path: Path) -> list[str]:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "nan"))
    _poison(folder / "model.safetensors", "model.layers.0.self_attn.dt_bias")
    return [f"model={folder}"]


def _poison(weights: Path, name: str) -> None:
    """Write a NaN into the first element of a float32 tensor, in place."""
    content = bytearray(weights.read_bytes())
    size = int.from_bytes(content[:8], "little")
    tensor = json.loads(content[8 : 8 + size])[name]
    assert tensor["dtype"] == "F32"
    start = 8 + size + tensor["data_offsets"][0]
    content[start : start + 4] = np.float32("nan").tobytes()
    weights.write_bytes(content)


def _unwritable(tmp_path: Path) -> list[str]:
    (tmp_path / "results").write_text("a file, not a folder")
    return []


WRONG = {
    "misspelt variant": (lambda _: ["variant=bf16_steam"], 2, "no variant 'bf16_steam'; did you mean 'bf16_stream'?"),
    "override typo": (lambda _: ["variant.kda.prefil=chunk"], 2, "did you mean 'variant.kda.prefill'?"),
    "missing file": (lambda _: ["golden=goldens/none.json"], 3, "none.json"),
    "missing checkpoint": (lambda _: ["model=kimi/none"], 3, "no checkpoint 'kimi/none'"),
    "golden of another tokenizer": (_another_tokenizer, 3, "made with another tokenizer"),
    "truncated shard": (_truncated, 3, "model.safetensors"),
    "NaN weights": (_nan_weights, 3, "model.layers.0.self_attn.dt_bias"),
    "empty golden": (_empty_golden, 3, "nothing can be compared"),
    "wrong device": (lambda _: ["device=cuda", "device.index=9"], 4, "device cuda:9 is not there"),
    "no run": (_no_run, 3, "K, N, T = (0, 8, 16)"),
    "one run, and a bar required": (_one_run, 2, "one run (K = 1), so its bar is unmeasured"),
    "unwritable results": (_unwritable, 4, "cannot be written"),
    "misspelt flag": (lambda _: ["--requir"], 2, "did you mean 'require'?"),
    "flag with a value it cannot have": (lambda _: ["--require=most"], 2, "expected one of bar, strict, exact"),
    "more prompts than there are": (lambda _: ["limit=9"], 2, "has 8 prompts of 16 tokens"),
    "sweep without -m": (lambda _: ["variant=f32,oracle"], 2, "add -m"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_told_in_one_line(name: str, tmp_path: Path, capsys: Captured) -> None:
    """One line that says what was got and what would do, the exit code of its class, no traceback."""
    words, code, said = WRONG[name]
    argv = ["gate", "variant=f32", *words(tmp_path), f"results={tmp_path / 'results'}"]
    assert main(argv) == code
    assert said in error_line(capsys)


def test_a_misspelt_command_is_told_in_one_line(capsys: Captured) -> None:
    """The nearest command is named; exit code 2."""
    assert main(["gatee"]) == 2
    assert error_line(capsys) == "neartie: error: no command 'gatee'; did you mean 'gate'?"


def test_an_error_is_a_document_with_json(capsys: Captured) -> None:
    """With --json, stdout holds one JSON object with class, message and exit code; stderr still has the line."""
    assert main(["gate", "variant=none_such", "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["error"]["class"] == "UsageError"
    assert document["error"]["exit_code"] == 2
    assert err == f"neartie: error: {document['error']['message']}\n"


def test_a_failed_run_is_on_record(tmp_path: Path, capsys: Captured) -> None:
    """An input error after the settings were read leaves a row that says so."""
    assert main(["gate", "golden=none", f"results={tmp_path}"]) == 3
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["status"], row["golden"]) == ("failed", "none")
    assert "no golden 'none'" in row["error"]


def _stub(monkeypatch: pytest.MonkeyPatch, errors: dict[int, BaseException]) -> list[int]:
    """Put in the place of a gate's work one that notes `limit` and raises what `errors` has for it."""
    ran: list[int] = []

    def run(config, flags) -> int:
        ran.append(config.limit)
        if config.limit in errors:
            raise errors[config.limit]
        return 0

    monkeypatch.setattr(gate, "run", run)
    monkeypatch.delattr(gate, "report")
    return ran


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("a defect"), 6, "internal: RuntimeError: a defect"),
        (SystemExit(7), 6, "SystemExit: 7"),
        (MemoryError("3 GB"), 4, "out of memory"),
    ],
    ids=["defect", "exit", "memory"],
)
def test_a_failing_job_does_not_take_the_others_down(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """All jobs run, every failure is listed by its job, and the exit code is the worst."""
    ran = _stub(monkeypatch, {2: error, 3: ValueError("another")})
    assert main(["gate", "-m", "limit=1,2,3,4"]) == max(code, 6)
    assert ran == [1, 2, 3, 4]
    err = capsys.readouterr().err
    assert "2 of 4 jobs failed, 0 not started" in err
    assert f"[limit=2] {said}" in err or said in err
    assert "[limit=3] internal: ValueError: another" in err


def test_an_interruption_ends_a_multirun(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Ctrl-C stops the job and those after it, and the exit code is 130."""
    ran = _stub(monkeypatch, {2: KeyboardInterrupt()})
    assert main(["gate", "-m", "limit=1,2,3"]) == 130
    assert ran == [1, 2]
    assert "1 of 3 jobs failed, 1 not started" in capsys.readouterr().err


def test_a_misspelt_job_stops_a_multirun_before_it_starts(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Settings of all jobs are read first, so a typo in the last costs no run of the first."""
    ran = _stub(monkeypatch, {})
    assert main(["gate", "-m", "variant=f32,orakle"]) == 2
    assert ran == []
    assert "did you mean 'oracle'?" in error_line(capsys)


def test_a_defect_is_one_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """An error that is none of ours is exit code 6, one line, and a traceback in the file that it names."""
    _stub(monkeypatch, {0: RuntimeError("a defect")})
    assert main(["gate"]) == 6
    line = error_line(capsys)
    path = Path(line.rpartition("traceback in ")[2])
    assert "RuntimeError: a defect" in path.read_text()
    path.unlink()


def test_flags_take_a_value_either_way(capsys: Captured) -> None:
    """`--require 100`, `--require=100` and a bare `--require` before an override are all read."""
    for words, said in ((["--require", "100"], "100"), (["--require=exact"], "exact"), (["--require"], "bar")):
        assert main(["gate", *words, "limit=2", "--config"]) == 0
        assert f"require: {said!r}" in capsys.readouterr().out.replace(f"require: {said}\n", f"require: {said!r}\n")


def test_a_setting_with_dashes_is_told_how_settings_are_written(capsys: Captured) -> None:
    """`--variant f32`, as other tools have it, is answered with this one's grammar; a misspelt flag with its name."""
    assert main(["verdict", "--variant", "f32"]) == 2
    assert "no flag '--variant'; settings are KEY=VALUE" in error_line(capsys)
    assert main(["verdict", "--fial"]) == 2
    assert "did you mean 'fail'" in error_line(capsys)


def test_config_prints_every_job(capsys: Captured) -> None:
    """--config shows the settings of each job as YAML and runs nothing."""
    assert main(["gate", "-m", "variant=f32,oracle", "--config"]) == 0
    out = capsys.readouterr().out
    assert out.count("---") == 1
    assert "gemm: f32" in out
    assert "gemm: f64" in out


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["variant=f32_native", "variant.gemm=bf16"], "; this command sets variant.gemm=bf16"),
        (["variant=fast_decode", "variant.gemm=f32"], "; this command sets variant.gemm=f32"),
        (["variant=paged_native", "variant.gemm=bf16", "variant.tf32=true"],
         "; this command sets variant.gemm=bf16, variant.tf32=true"),
        (["variant=f32", "variant.mla.tile_q=64"], "; remove it or change the other setting"),
        (["variant=f32", "variant.gemm=bf15"], "expected one of [f64, f32, f16, bf16_f32out, bf16]"),
        (["variant=f33"], "did you mean 'f32'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("many", [False, True])
def test_a_refusal_names_what_was_changed(words: list[str], ending: str, many: bool, capsys: Captured) -> None:
    """Where a variant is refused for another setting than the command's own, these are named; where not, nothing is."""
    assert main(["explain", *(["-m"] if many else []), *words]) == 2
    assert capsys.readouterr().err.rstrip().endswith(ending)


def test_explain_tells_the_same_arm(capsys: Captured) -> None:
    """Two variants that resolve to one recipe are called the same arm; two that differ are listed site by site."""
    assert main(["explain", "variant=f64_islands", "against=f64_islands"]) == 0
    assert "the same arm" in capsys.readouterr().out
    assert main(["explain", "variant=bf16_residual", "against=f64_islands", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hash"] != document["against_hash"]
    assert {"site": "attn_residual", "field": "output", "a": "bf16", "b": "f32"} in document["difference"]


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("f32", ["execution: mode=incremental"]),
        ("fast_decode", ["execution: mode=incremental fused=True graph=cuda"]),
        ("f32_native", ["execution: mode=incremental fused=True", "cache: expanded"]),
        (
            "paged_native",
            ["execution: mode=paged batch=8 prefill_batch=4", "cache: expanded", "batch_dependent: nowhere"],
        ),
        ("llama_cpp", ["execution: mode=incremental", "semantics: l2norm_eps=1e-05"]),
    ],
)
def test_explain_leaves_defaults_out(variant: str, said: list[str], capsys: Captured) -> None:
    """Above the table stand how it runs and what departs from its default, and nothing else."""
    assert main(["explain", f"variant={variant}"]) == 0
    name, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert name.startswith(f"{variant}  ")
    assert lines == said


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["variant=f32_native_plain", "against=f32_native"], ["execution fused False True"]),
        (["variant=paged_engine_graph", "against=paged_engine"], [
            "execution graph cuda off", "execution decode_filled_up_to 1,2,4,8,16,32,64 -"]),
        (["variant=f32", "+variant.override.kda_core={output: bf16, layers: [0]}", "against=f32"], [
            f"exceptions.kda_core.{phase}@0 {field} bf16 f32"
            for phase in ("decode", "prefill") for field in ("output", "storage")]),
    ],
)  # fmt: skip
def test_explain_lists_what_differs_and_no_default(words: list[str], rows: list[str], capsys: Captured) -> None:
    """A setting that one recipe does not name is compared at its default, an exception with its rule."""
    assert main(["explain", *words]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()[2:]
    assert [" ".join(line.split()) for line in table] == rows


def test_a_rule_that_every_layer_overrides_is_no_difference(capsys: Captured) -> None:
    """Its layers are compared instead; a rule that is left to one layer is listed still."""
    once = ["variant=vllm_mirror", "variant.elementwise.swiglu=once"]

    def told(*words: str) -> str:
        assert main(["explain", *words, "against=vllm_mirror"]) == 0
        return capsys.readouterr().out

    named = told("variant=vllm_compiled")
    assert "\nmlp_silu " in named
    assert "expert_silu" not in named
    rows = json.loads(told("variant=vllm_compiled", "--json"))["difference"]
    assert "expert_silu" not in {row["site"] for row in rows}
    assert "\nexpert_silu " in told(*once, "+variant.override.expert_silu={output: bf16, layers: [1, 2, 3]}")
    other = told(*once, "+variant.override.expert_silu={output: f32}")
    assert "\nexceptions.expert_silu@3 " in other
    assert "\nexpert_silu " not in other
    every = [f"+variant.override.{name}_silu={{output: bf16}}" for name in ("mlp", "shared", "expert")]
    assert told(*once, *every).endswith(": the same at every layer; what differs are rules that all of them override\n")


def test_explain_refuses_what_it_would_ignore(capsys: Captured) -> None:
    """A second variant that does not exist is a usage error, as the first one is."""
    assert main(["explain", "variant=f32", "against=f33"]) == 2
    assert "no variant 'f33'; did you mean 'f32'?" in error_line(capsys)


@pytest.mark.parametrize("action", ["list", "show gate", "verify wide"])
def test_golden_answers_in_json(action: str, capsys: Captured) -> None:
    """Each reading action of `golden` gives one JSON document."""
    assert main(["golden", *action.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_golden_goes_out_and_comes_back(tmp_path: Path, capsys: Captured) -> None:
    """export then import keeps every token; a folder whose name holds an equals sign is a folder still."""
    folder, path = tmp_path / "run=1", tmp_path / "again.json"
    assert main(["golden", "export", "gate", str(folder)]) == 0
    assert main(["golden", "import", str(folder), str(path)]) == 0
    assert np.array_equal(load_golden(path).tokens, load_golden("gate").tokens)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["shwo", "gate"], "did you mean 'show'?"), (["show"], "takes 1 words, got 0: neartie golden show G")],
)
def test_a_wrong_action_is_told_in_one_line(words: list[str], said: str, capsys: Captured) -> None:
    """A misspelt action and a missing word are usage errors that say what would do."""
    assert main(["golden", *words]) == 2
    assert said in error_line(capsys)


def test_a_broken_golden_fails_its_check(tmp_path: Path, capsys: Captured) -> None:
    """`golden verify` exits 3 where a golden contradicts itself, so that a script can rely on it."""
    path = write_golden(load_golden("gate"), tmp_path / "g.json").path
    assert path is not None
    path.write_text(path.read_text().replace('"runs": 3', '"runs": 4'))
    assert main(["golden", "verify", str(path)]) == 3


def test_variants_are_listed(capsys: Captured) -> None:
    """Every named variant has its line."""
    assert main(["variants", "--json"]) == 0
    assert {"f32", "oracle", "bf16_stream"} <= json.loads(capsys.readouterr().out).keys()


def test_doctor_finds_a_sound_checkout(tmp_path: Path, capsys: Captured) -> None:
    """Here all that is needed is installed and the shipped files are whole."""
    assert main(["doctor", f"results={tmp_path}", "--json"]) == 0
    found = {entry["what"]: entry["found"] for entry in json.loads(capsys.readouterr().out)}
    listed = (ASSETS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert found["assets"] == f"{len(listed)} files whole"
    assert len(listed) > 11


def test_doctor_finds_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A shipped file that is missing or not as it was shipped is named, with exit code 3."""
    copy = Path(shutil.copytree(ROOT / "assets", tmp_path / "assets"))
    next(copy.glob("goldens/*/gate.json")).write_text("{}")
    next(copy.glob("goldens/*/wide.npz")).unlink()
    monkeypatch.setattr(doctor, "ASSETS", copy)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "missing or changed: goldens/vllm-0.26.0-h200/gate.json, goldens/vllm-0.26.0-h200/wide.npz" in out


def test_doctor_finds_a_broken_checkpoint(tmp_path: Path, capsys: Captured) -> None:
    """A checkpoint that is cut short is named, with exit code 3."""
    (word,) = _truncated(tmp_path)
    assert main(["doctor", word]) == 3
    assert "NOT USABLE" in capsys.readouterr().out


def test_a_reader_that_stops_early_is_no_error() -> None:
    """`neartie explain | head -1` ends quietly."""
    script = f"{sys.executable} -m experiments.cli explain | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")

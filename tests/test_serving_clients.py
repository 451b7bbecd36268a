"""Real clients, unmodified: the official package, curl, this project's own gate, lm-eval."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

from serving import local, serving

from experiments.cli import main
from harness.golden import load_golden
from harness.ledger import Ledger
from harness.serving.server import Beside

KEY = "sk-of-a-test"
TEXT = "The quick brown"


@pytest.fixture(scope="module")
def server() -> Iterator[Beside]:
    """One that asks for a key."""
    with serving(key=KEY) as beside:
        yield beside


@pytest.mark.parametrize("more", [[], ["engine.concurrency=8"], ["engine.stream=true", "limit=2"]])
def test_the_gate_is_a_client(more: list[str], server: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """engine=openai: the tokens of the library's paged run, one at a time, eight at a time, and as a stream."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    words = ["engine=openai", f"engine.url={server.url}/v1", "engine.dialect=vllm", f"results={tmp_path}"]
    assert main(["gate", "max_tokens=8", *words, *more]) == 0
    (row,) = Ledger(tmp_path / "ledger").rows()
    prompts = load_golden("gate").prompts[: 2 if len(more) == 2 else 8]
    assert row["detail"]["tokens"] == local().generate(prompts, 8).tokens.tolist()


def test_the_official_package(server: Beside) -> None:
    """Completions, a stream, logprobs, models, and its own errors for a wrong key and a wrong field."""
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        (model,) = client.models.list().data
        asked = {"model": model.id, "prompt": TEXT, "max_tokens": 6, "temperature": 0}
        whole = client.completions.create(**asked, logprobs=2)
        assert whole.usage.completion_tokens == 6
        assert len(whole.choices[0].logprobs.token_logprobs) == 6
        parts = client.completions.create(**asked, stream=True)
        assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text
        ids = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0].token_ids
        assert len(ids) == 6
        with pytest.raises(openai.BadRequestError, match="context length"):
            client.completions.create(**{**asked, "max_tokens": 10_000})
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**asked, "model": "gpt-4"})
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Beside) -> None:
    """As the README writes it; without the key 401, health without one."""

    def curl(path: str, *more: str) -> str:
        command = ["curl", "--silent", "--max-time", "60", *more, f"{server.url}{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    key, kind = ["-H", f"Authorization: Bearer {KEY}"], ["-H", "Content-Type: application/json"]
    body = json.dumps({"prompt": TEXT, "max_tokens": 3, "temperature": 0})
    assert json.loads(curl("/v1/completions", *key, *kind, "-d", body))["usage"]["completion_tokens"] == 3
    assert json.loads(curl("/v1/completions", *kind, "-d", body))["error"]["code"] == "invalid_api_key"
    assert json.loads(curl("/v1/completions", *key, "-d", body))["error"]["message"].startswith("content type")
    assert json.loads(curl("/health"))["status"] == "ok"
    assert "neartie_tokens_total" in curl("/metrics", *key)


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [" color", " zebra"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason='needs lm-eval: pip install "lm_eval[api]"')
def test_lm_eval(server: Beside, tmp_path: Path) -> None:
    """Its local-completions model scores a task of two choices, by text and by ids, through echoed logprobs."""
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps({"text": f"{t} brownish"}) + "\n" for t in ("The quick", "A small", "The")))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    folder = Path(__file__).parents[1] / "assets" / "kimi-linear-12m"
    asked = f"base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1,tokenizer={folder},max_length=256"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny", "--include_path"]
    command += [str(tmp_path), "--model_args", f"model=kimi-linear-12m,{asked}", "--output_path", str(tmp_path)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OPENAI_API_KEY": KEY}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = tmp_path.rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["tiny"]["acc,none"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_500(tmp_path: Path) -> None:
    """Over the whole description, fuzzed: no 500, and every answer is one that the description has."""
    with serving(queue=64) as beside:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{beside.url}/openapi.json", "--seed", "1"]
        command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--request-timeout", "60"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert beside.service.desk.engine.stats.pages_used == 0

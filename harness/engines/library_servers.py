"""llama.cpp and MLX as a Config asks for them: their own servers, started and stopped here, or the library itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import Api, Dialect, Via
from harness.convert import Target, convert
from harness.engines.assets import checkpoint_folder
from harness.engines.http_server import JsonServer
from harness.engines.llama_child import LlamaSettings, start
from harness.engines.llama_server import LlamaOrigin, LlamaServerEngine
from harness.engines.mlx_engine import MlxEngine, library
from harness.engines.openai_engine import Habits, OpenAIEngine
from harness.engines.prompt_text import PromptText
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.server_process import Scratch, ServerProcess
from harness.gguf_write import WeightFormat
from variants.checkpoint import load_checkpoint
from variants.errors import EngineError, UsageError

if TYPE_CHECKING:
    from harness.config import Config
    from harness.engines.protocol import Engine

MLX_CHILD = "harness.engines.mlx_child"
SERVED = "default_model"  # what MLX's server calls the model that it was started with


@dataclass
class OwnedServer:
    """An OpenAI-compatible engine over a server of ours. about: what `info` knows beyond what the server says.

    process: the server's, None where it runs in this process. keeps: what must live as long as the engine.
    """

    engine: OpenAIEngine
    about: Mapping[str, Any]
    process: ServerProcess | None = None
    keeps: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def info(self) -> EngineInfo:
        return replace(self.engine.info, **self.about)

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """As `OpenAIEngine.generate`; whether a row ends at EOS is the model folder's or file's matter."""
        return self.engine.generate(prompts, max_tokens, stop_at_eos=stop_at_eos)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        """As `OpenAIEngine.score`."""
        return self.engine.score(prompts, continuations, top_k=top_k)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


class InProcessServer:
    """llama.cpp's server inside this process, asked by a call instead of a request (`/v1/completions` alone)."""

    name = "in-process"

    def __init__(self, server: Any, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s

    def get(self, path: str) -> dict[str, Any]:
        """It has one model, whose name nobody asks for."""
        assert path == "/v1/models", path
        return {"data": [{"id": "model"}]}

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EngineError where the server answers with an error, or not within its time."""
        assert path == "/v1/completions", path
        found: dict[str, Any] = {}

        def ask() -> None:
            try:
                found.update(self._server.handle_completions(dict(body)))
            except (RuntimeError, ValueError) as error:
                found["error"] = str(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self._timeout_s)
        if asking.is_alive():
            raise EngineError(f"llama.cpp gave no answer within {self._timeout_s:g} s; raise engine.timeout_s")
        if "choices" not in found:
            raise EngineError(f"llama.cpp failed: {json.dumps(found)[:200]}")
        return found


def llama_engine(config: Config) -> Engine:
    """llama.cpp as the Config says. Raises what its engine and its server raise."""
    choice = config.engine
    if choice.url:
        server = JsonServer(choice.url, timeout_s=choice.timeout_s, retries=choice.retries)
        if choice.api is Api.openai:
            raise UsageError("engine.api=openai with a server's own engine.url is engine=openai engine.dialect=llama")
        return LlamaServerEngine(server, LlamaOrigin(), slots=choice.concurrency)
    settings = LlamaSettings(
        gguf=choice.gguf or "",
        kv=choice.kv.name,
        flash=choice.flash,
        slots=choice.concurrency,
        threads=config.device.threads,
    )
    native = _native(config, settings) if choice.via is not Via.process else None
    if choice.api is Api.native:
        assert native is not None
        return native
    return _llama_v1(config, settings, native)


def _native(config: Config, settings: LlamaSettings) -> LlamaServerEngine:
    if settings.gguf:
        return LlamaServerEngine.of_file(settings, timeout_s=config.engine.timeout_s)
    return LlamaServerEngine.of_checkpoint(
        checkpoint_folder(config.model.path),
        settings,
        weights=WeightFormat[config.engine.dtype.name],
        expect_sha256=config.model.sha256,
        timeout_s=config.engine.timeout_s,
    )


def _llama_v1(config: Config, settings: LlamaSettings, native: LlamaServerEngine | None) -> OwnedServer:
    """`/v1/completions` of the same server, or of one inside this process."""
    habits = _habits(config, Dialect.llama, top_k=20)
    if native is not None:
        assert native.process is not None
        server = JsonServer(native.process.url, timeout_s=config.engine.timeout_s, retries=0)
        about = _about(native.info)
        return OwnedServer(OpenAIEngine(server, habits), about, process=native.process, keeps=(native,))
    place, origin = None, LlamaOrigin(settings=settings)
    if not settings.gguf:
        place = Scratch()
        checkpoint = load_checkpoint(checkpoint_folder(config.model.path), expect_sha256=config.model.sha256)
        settings = replace(settings, gguf=str(place.path / "model.gguf"))
        weights = WeightFormat[config.engine.dtype.name]
        convert(checkpoint, settings.gguf, target=Target.gguf, weights=weights)
        origin = LlamaOrigin.of(checkpoint, settings, weights)
    server = InProcessServer(start(settings), config.engine.timeout_s)
    about = _about(LlamaServerEngine(JsonServer("http://in.process"), origin).info)
    return OwnedServer(OpenAIEngine(server, habits), about, keeps=(place,))  # pyright: ignore[reportArgumentType]


def _about(info: EngineInfo) -> dict[str, Any]:
    known = ("name", "version", "device", "dtype", "model_sha256", "tokenizer_sha256", "max_length")
    return {name: getattr(info, name) for name in known} | {"can_score": False}


def _habits(config: Config, dialect: Dialect, **more: Any) -> Habits:
    unfinished = Path(config.results) / "unfinished"
    return Habits(dialect=dialect, concurrency=config.engine.concurrency, folder=unfinished, **more)


def mlx_engine(config: Config) -> Engine:
    """MLX as the Config says. Raises what the library's loading raises, and its server."""
    folder = checkpoint_folder(config.model.path)
    if config.engine.via is not Via.http:
        return MlxEngine.load(folder, expect_sha256=config.model.sha256)
    library()  # says plainly where it is not installed
    checkpoint = load_checkpoint(folder, expect_sha256=config.model.sha256)
    place = Scratch()
    # The server computes in the dtype that is stored, and stops at an end of sequence wherever one is named.
    convert(checkpoint, place.path, target=Target.hf, weights=WeightFormat.f32, eos_reachable=False)
    process = ServerProcess(MLX_CHILD, {"folder": str(place.path), "concurrency": config.engine.concurrency})
    server = JsonServer(process.url, timeout_s=config.engine.timeout_s, retries=0)
    habits = _habits(config, Dialect.mlx, top_k=0, served=SERVED, as_text=True, text=PromptText(place.path))
    engine = OpenAIEngine(server, habits)
    about = {
        "name": "mlx_server",
        "version": MlxEngine.version(),
        "device": "cpu",
        "dtype": "f32",
        "model_sha256": checkpoint.sha256,
        "max_length": checkpoint.config.max_length,
        "can_score": False,
        "limits": ("takes prompts as text", "gives no ranked logprobs beside ids"),
    }
    return OwnedServer(engine, about, process=process, keeps=(place,))

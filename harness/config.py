"""The configuration of a run, typed and frozen; `harness.compose` fills it from conf/ and the command line.

A setting with no effect is refused, so that a record never holds one.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import ClassVar

from omegaconf import MISSING

from variants.axes import Variant
from variants.errors import UsageError


class EngineKind(Enum):
    """A variant in this process, a library in this process, a server, or tokens in files."""

    local = "local"
    transformers = "transformers"
    replay = "replay"
    openai = "openai"
    vllm = "vllm"
    llama_server = "llama_server"
    mlx = "mlx"


class EngineDtype(Enum):
    """The dtype that a library loads the weights in."""

    f32 = "float32"
    bf16 = "bfloat16"
    f16 = "float16"


class Attention(Enum):
    """The attention that a library is asked for."""

    eager = "eager"
    sdpa = "sdpa"


class Experts(Enum):
    """How a library sums the experts of a token: grouped, rounded once, or one by one, rounded after each."""

    grouped_mm = "grouped_mm"
    eager = "eager"


class Dialect(Enum):
    """Whose extra fields a server takes: none but OpenAI's own, vLLM's, or those of llama.cpp's or MLX's server."""

    openai = "openai"
    vllm = "vllm"
    llama = "llama"
    mlx = "mlx"


class Feed(Enum):
    """What a server is given as a prompt: token ids, or text, which it turns to ids itself."""

    ids = "ids"
    text = "text"


class KvType(Enum):
    """Format of llama.cpp's cache of keys and values (here the latent)."""

    f32 = "f32"
    f16 = "f16"


class Api(Enum):
    """llama.cpp's own `/completion`, or `/v1/completions`, which it offers too."""

    native = "native"
    openai = "openai"


class Via(Enum):
    """A server of its own process, over HTTP, or the library inside this process."""

    http = "http"
    process = "process"


_SERVER = "key feed tokenizer concurrency timeout_s retries top_k"

# What each kind of engine reads, beside `kind`: settings of `engine`, then groups and settings of the root.
READS: dict[EngineKind, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(own.split()), frozenset(groups.split()))
    for kind, own, groups in (
        (EngineKind.local, "", "model variant device"),
        (EngineKind.transformers, "dtype attention experts", "model device"),
        (EngineKind.replay, "folder run", ""),
        (EngineKind.openai, f"{_SERVER} url served dialect stream", ""),
        (EngineKind.vllm, "dtype backend batch memory top_k compile graph", "model"),
        (EngineKind.llama_server, "dtype gguf url kv flash api via concurrency timeout_s", "model device"),
        (EngineKind.mlx, "via concurrency timeout_s", "model device"),
    )
}


class DeviceKind(Enum):
    cpu = "cpu"
    cuda = "cuda"


class WeightsFrom(Enum):
    """The checkpoint's own, or drawn at random on the device, whose geometry alone is then read."""

    stored = "stored"
    random = "random"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint: a folder, or a bare name under assets/; `sha256` is of the weights' bytes and is then required.

    weights=random: drawn on the device from `seed` of the run; path is a folder or a file with the config.json, or a
    name under conf/geometry/.
    """

    path: str = MISSING
    sha256: str | None = None
    weights: WeightsFrom = WeightsFrom.stored

    def __post_init__(self) -> None:
        named = self.sha256 is not None and self.weights is WeightsFrom.random
        _refuse(named, "model.sha256", "random weights are named by their seed")


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine answers; `READS` says which kind reads which setting, and any other is refused.

    dtype, attention, experts: of a library. folder: a folder, a NAME.json or a file of tokens; run: of its runs, None
    for the candidate in it. url: of an OpenAI-compatible server, without its /v1; served: the model's name there, None
    for the only one; dialect: whose extra fields it takes; key: the environment variable that holds the API key; feed:
    what prompts are sent as; tokenizer: the server's tokenizer.json, needed where it takes or gives text; concurrency:
    requests at a time; timeout_s: for one answer; retries: of a request that failed; top_k: logprobs asked for with
    each token, 0 for none; stream: read tokens as they come, which times them. backend: vLLM's attention; compile: its
    layers under its torch.compile; graph: its decode steps as CUDA graphs; batch: prompts that it is given together, 0
    for all; memory: the share of the GPU that it takes. gguf: llama.cpp's file, None to write one of the model; kv,
    flash: its cache and attention; api: how it is asked; via: a server of its own, or the library in this process (None
    for what the kind does by itself).
    """

    kind: EngineKind = EngineKind.local
    dtype: EngineDtype = EngineDtype.f32
    attention: Attention = Attention.eager
    experts: Experts = Experts.grouped_mm
    folder: str | None = None
    run: int | None = None
    url: str | None = None
    served: str | None = None
    dialect: Dialect = Dialect.openai
    key: str = "OPENAI_API_KEY"
    feed: Feed = Feed.ids
    tokenizer: str | None = None
    concurrency: int = 1
    timeout_s: float = 120.0
    retries: int = 3
    top_k: int = 20
    stream: bool = False
    backend: str | None = None
    compile: bool = False
    graph: bool = False
    batch: int = 1
    memory: float = 0.2
    gguf: str | None = None
    kv: KvType = KvType.f32
    flash: bool = False
    api: Api = Api.native
    via: Via | None = None

    def __post_init__(self) -> None:
        own, _ = READS[self.kind]
        for f in fields(self):
            changed = getattr(self, f.name) != f.default and f.name != "kind"
            _refuse(changed and f.name not in own, f"engine.{f.name}", f"engine={self.kind.name} does not read it")
        if self.kind is EngineKind.replay and not self.folder:
            raise UsageError("engine=replay needs engine.folder=DIR, the folder or the file that holds the tokens")
        if self.kind is EngineKind.openai and not self.url:
            raise UsageError("engine=openai needs engine.url=http://HOST:PORT, the server without its /v1")
        for name, least in (("concurrency", 1), ("retries", 0), ("top_k", 0), ("batch", 0), ("run", 0)):
            value = getattr(self, name)
            _refuse(value is not None and value < least, f"engine.{name}={value}", f"it must be {least} or more")
        self._check_library_servers()
        _refuse(self.timeout_s <= 0, f"engine.timeout_s={self.timeout_s}", "it must be above 0")
        _refuse(not 0 < self.memory <= 1, f"engine.memory={self.memory}", "it is a share, above 0 and up to 1")

    def _check_library_servers(self) -> None:
        """What llama.cpp's or MLX's settings say together."""
        here = self.via is Via.process or (self.via is None and self.kind is EngineKind.mlx)
        _refuse(here and self.concurrency > 1, "engine.concurrency", "in this process prompts run one after the other")
        if self.kind is not EngineKind.llama_server:
            return
        _refuse(here and self.api is Api.native, "engine.via=process", "in this process engine.api is openai alone")
        _refuse(bool(self.url and self.gguf), "engine.gguf", "a server at engine.url has its own file")
        ours = {"kv": self.kv is not KvType.f32, "flash": self.flash, "via": here, "dtype": self.dtype.name != "f32"}
        for name, changed in ours.items():
            by = "url" if self.url else "gguf" if self.gguf and name == "dtype" else None
            _refuse(changed and by is not None, f"engine.{name}", f"engine.{by} has what it has")

    @property
    def label(self) -> str:
        """What tells this engine's rows apart, for an engine whose arithmetic no variant names."""
        if self.kind is EngineKind.replay:
            return f"replay_{Path(self.folder or '').name.removesuffix('.json')}"
        if self.kind is EngineKind.openai:
            return f"openai_{self.served or 'server'}" + (f"_x{self.concurrency}" if self.concurrency > 1 else "")
        if self.kind is EngineKind.vllm:
            how = "".join(f"_{name}" for name in ("compile", "graph") if getattr(self, name))
            return f"vllm_{self.dtype.name}_{(self.backend or 'default').lower()}{how}_batch{self.batch or 'ed'}"
        if self.kind in (EngineKind.llama_server, EngineKind.mlx):
            return self._library_label()
        label = f"{self.kind.name}_{self.dtype.name}_{self.attention.name}"
        return label if self.experts is Experts.grouped_mm else f"{label}_experts_{self.experts.name}"

    def _library_label(self) -> str:
        llama = self.kind is EngineKind.llama_server
        kind = Path(self.gguf).stem if self.gguf else "url" if self.url else self.dtype.name
        parts = ["llama" if llama else "mlx", kind, f"kv_{self.kv.name}" if llama and not self.url else ""]
        parts += ["flash" if self.flash else "", "v1" if self.api is Api.openai else ""]
        parts += [self.via.name if self.via else "", f"x{self.concurrency}" if self.concurrency > 1 else ""]
        return "_".join(p for p in parts if p)


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """Where a run happens; `threads` is torch's intra-op threads on the host, 0 for what torch chooses.

    pipeline: the layers lie over so many devices from `index` on, in turn.
    """

    kind: DeviceKind = DeviceKind.cpu
    index: int = 0
    threads: int = 0
    pipeline: int = 1

    def __post_init__(self) -> None:
        _refuse(self.index != 0 and self.kind is DeviceKind.cpu, f"device.index={self.index}", "the cpu has no index")
        _refuse(self.index < 0, f"device.index={self.index}", "it must be 0 or more")
        _refuse(self.pipeline < 1, f"device.pipeline={self.pipeline}", "it must be 1 or more")
        several = self.pipeline > 1 and self.kind is DeviceKind.cpu
        _refuse(several, f"device.pipeline={self.pipeline}", "the cpu is one device")
        _refuse(self.threads < 0, f"device.threads={self.threads}", "it must be 0 (torch chooses) or more")

    @property
    def torch_name(self) -> str:
        """The name that torch.device takes: `cpu` or `cuda:1`."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every device of the run, as torch names it."""
        if self.kind is DeviceKind.cpu:
            return (self.kind.value,)
        return tuple(f"cuda:{self.index + i}" for i in range(self.pipeline))


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every command is given.

    golden: a name under assets/goldens/ or a path. limit: score the first so many prompts, 0 for all. max_tokens:
    score the first so many tokens of each prompt, 0 for all. require: None to report, else `bar`, `strict`, `exact`
    or the number of tokens that must agree. results: the folder that holds the ledger. label: the variant's name and
    what was changed of it, filled in by `compose.load`. own_words: settings that the command itself reads, whatever
    the engine does.
    """

    own_words: ClassVar[frozenset[str]] = frozenset()

    model: ModelSource = field(default_factory=ModelSource)
    golden: str = "gate"
    engine: EngineChoice = field(default_factory=EngineChoice)
    variant: Variant = field(default_factory=Variant)
    device: DeviceChoice = field(default_factory=DeviceChoice)
    seed: int = 0
    limit: int = 0
    max_tokens: int = 0
    require: str | None = None
    results: str = "results"
    label: str = ""

    def __post_init__(self) -> None:
        for name in ("seed", "limit", "max_tokens"):
            value = getattr(self, name)
            _refuse(value < 0, f"{name}={value}", "it must be 0 or more")
        words = ("bar", "strict", "exact")
        if self.require is not None and self.require not in words and not self.require.isdigit():
            raise UsageError(f"require={self.require}: expected one of {', '.join(words)}, or a number of tokens")


def _refuse(bad: bool, setting: str, why: str) -> None:
    if bad:
        raise UsageError(f"{setting} has no effect or cannot be: {why}")

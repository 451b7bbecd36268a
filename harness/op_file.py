"""A captured operation as one safetensors file: its tensors, and a JSON document in the header that says what they are.

The document holds the place, the step, the geometry, the whole recipe, the model's hash and a hash of the content; what
is read back is checked against that, so a file that was cut or edited is refused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.op_capture import OpCapture, laid_out
from harness.op_stage import Inputs, Where
from variants.axes import Execution, ExecutionAxes, Preempt
from variants.dtypes import DType
from variants.errors import DeviceError, InputError
from variants.model_config import LayerKind, ModelConfig
from variants.recipe import Recipe, Rule, Semantics

SCHEMA = 1
HEADER = "neartie"
SUFFIX = ".safetensors"
ENUMS = {"mode": Execution, "preempt": Preempt}
FORMATS = ("input", "accum", "output", "storage")


def write_capture(capture: OpCapture, path: str | Path) -> Path:
    """Write a capture; returns the path, with .safetensors after it where it was not.

    Raises DeviceError where the file cannot be written.
    """
    path = Path(path) if str(path).endswith(SUFFIX) else Path(f"{path}{SUFFIX}")
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in _tensors(capture)}
    document = json.loads(json.dumps(_document(capture)))
    document["content_sha256"] = _digest(document, tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={HEADER: json.dumps(document)})
    except (OSError, SafetensorError) as error:
        raise DeviceError(f"cannot write {path}: {error}; give a folder that can be written") from error
    return path


def read_capture(path: str | Path) -> OpCapture:
    """Read a capture back; raises InputError for a file that is none, is newer, or whose hash is not its content's."""
    if not Path(path).is_file():
        raise InputError(
            f"cannot read {str(path)!r}: no such file; expected one that `neartie bisect capture=DIR` wrote"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot read {path}: {error}; expected a file that `neartie bisect capture=DIR` wrote"
        ) from error
    if header is None:
        raise InputError(f"{path} is no captured operation: its header has no {HEADER!r}; give a file of bisect's")
    try:
        return _capture(path, json.loads(header), tensors)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: its header is not one of a captured operation ({error}); capture again") from error


def _capture(path: str | Path, document: dict, tensors: Mapping[str, Tensor]) -> OpCapture:
    if document["schema"] > SCHEMA:
        raise InputError(f"{path} has schema {document['schema']}, this reader knows up to {SCHEMA}; update neartie")
    said = document.pop("content_sha256")
    if said != _digest(document, tensors):
        raise InputError(f"{path}: the content is not what its hash says: it was cut or edited; capture again")
    tensors = {name: laid_out(x, *document["layout"][name]) for name, x in tensors.items()}
    recipe = _recipe(document["recipe"])
    if recipe.hash != document["recipe_hash"]:
        raise InputError(f"{path}: its recipe reads back as another one; it was written by another version of neartie")
    where = document["where"]
    return OpCapture(
        where=Where(**{**where, "starts": tuple(where["starts"]), "lengths": tuple(where["lengths"])}),
        config=_config(document["config"]),
        recipe=recipe,
        model_sha256=document["model_sha256"],
        inputs=Inputs(
            values={site: tuple(calls.values()) for site, calls in _nested(tensors, "values").items()},
            carried=_flat(tensors, "carried"),
            parameters=_flat(tensors, "parameters"),
        ),
        output=tuple(x for _, x in sorted(_flat(tensors, "output").items())),
    )


def _tensors(capture: OpCapture) -> Iterator[tuple[str, Tensor]]:
    for site, calls in capture.inputs.values.items():
        yield from ((f"values/{site}/{i:04d}", x) for i, x in enumerate(calls))
    for kind in ("carried", "parameters"):
        yield from ((f"{kind}/{name}", x) for name, x in getattr(capture.inputs, kind).items())
    yield from ((f"output/{i:04d}", x) for i, x in enumerate(capture.output))


def _flat(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{kind}/"): x for n, x in tensors.items() if n.startswith(f"{kind}/")}


def _nested(tensors: Mapping[str, Tensor], kind: str) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in sorted(_flat(tensors, kind).items()):
        site, _, call = name.partition("/")
        found.setdefault(site, {})[call] = x
    return found


def _document(capture: OpCapture) -> dict[str, object]:
    config = asdict(capture.config)
    return {
        "schema": SCHEMA,
        "where": asdict(capture.where),
        "config": {**config, "layer_kinds": [kind.name for kind in capture.config.layer_kinds]},
        "recipe": capture.recipe.as_dict(),
        "recipe_hash": capture.recipe.hash,
        "rule": capture.recipe.rule(*capture.where.place, capture.where.phase).as_dict(),
        "layout": {name: (x.stride(), x.storage_offset()) for name, x in _tensors(capture)},
        "model_sha256": capture.model_sha256,
        "made_with": {"torch": torch.__version__, "threads": torch.get_num_threads()},
    }


def _digest(document: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the document as canonical JSON, then of each tensor's name, dtype, shape and bytes, names in order."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"\n{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _config(document: dict) -> ModelConfig:
    kinds = tuple(LayerKind[name] for name in document["layer_kinds"])
    known = {f.name: document[f.name] for f in fields(ModelConfig)}
    return ModelConfig(**{**known, "layer_kinds": kinds, "moe_layers": tuple(document["moe_layers"])})


def _recipe(document: dict) -> Recipe:
    """A recipe from what `Recipe.as_dict` made of it."""
    execution, semantics = document["execution"], document["semantics"]
    recipe = Recipe(
        rules={key: _rule(rule) for key, rule in document["sites"].items()},
        execution=ExecutionAxes(**{n: ENUMS[n][x] if n in ENUMS else x for n, x in execution.items()}),
        semantics=Semantics(
            kv_eps=semantics["kv_a_layernorm_eps"],
            l2_eps=semantics.get("l2norm_eps"),
            bf16_params=frozenset(semantics["params_rounded_to_bf16"]),
        ),
        expanded_cache=document["cache"] == "expanded",
        fused_projections=document["fused_projections"],
        tf32=document["tf32"],
    )
    exceptions = {}
    for name, rule in document["exceptions"].items():
        key, _, layer = name.rpartition("@")
        exceptions[(key, int(layer))] = _rule(rule)
    return replace(recipe, exceptions=exceptions)


def _rule(document: dict) -> Rule:
    formats = {name: None if document[name] == "keep" else DType[document[name]] for name in FORMATS}
    known = {"algorithm": document["algorithm"], "impl": document["impl"]}
    options = tuple((name, value) for name, value in document.items() if name not in formats and name not in known)
    return Rule(**formats, **known, options=options)

"""Rates of the transformers library on the very weights that our variants read, in the same memory: eager, and graphed.

The graph is of one step: each replay appends the same token to the same cache, so its shapes are those of that context.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.device_timing import Timed, events_ms
from harness.engines.transformers_load import bound_kernels, modeling, quiet
from harness.rates import Asked, Rates
from variants.checkpoint_library import library_tensors
from variants.checkpoint_write import config_fields
from variants.errors import EngineError
from variants.graph import captured
from variants.weights import Casts

PREFILL_REPEATS, REPLAYS = 5, 20
PIECE = 2048  # tokens of a prompt that run together: its chunked form takes gigabytes for more


def library_model(casts: Casts) -> Any:
    """The library's model in bf16 over a checkpoint's tensors: none is copied that the library keeps as it lies.

    Raises EngineError where a parameter is left without a tensor.
    """
    library, config = modeling(casts.device), casts.checkpoint.config
    options = library.KimiLinearConfig.from_dict(config_fields(config))
    with quiet(), torch.device("meta"):
        model = library.KimiLinearForCausalLM._from_config(
            options, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="grouped_mm"
        )
    wanted = dict(model.state_dict(keep_vars=True))
    tensors = library_tensors(casts.checkpoint.tensors, config)
    if wanted.keys() != tensors.keys():
        raise EngineError(f"transformers: {min(wanted.keys() ^ tensors.keys())} is there or here alone")
    held = {name: t.view(wanted[name].shape).to(casts.device, wanted[name].dtype) for name, t in tensors.items()}
    model.load_state_dict(held, assign=True)
    return model.eval()


class _Sequence:
    """One sequence of the library with its cache."""

    def __init__(self, model: Any, library: Any) -> None:
        self.model, self.cache = model, library.DynamicCache(config=model.config)
        named = inspect.signature(type(model).forward).parameters
        self.name = "cache" if "cache" in named else "past_key_values"  # renamed in 5.24

    def __call__(self, ids: Tensor, masks: dict[str, Tensor | None] | None = None) -> Tensor:
        """bf16 [V] after the last of `ids`; masks: by kind of layer, None for the library's own."""
        given = {self.name: self.cache, "attention_mask": masks}
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits[0, -1]


@torch.inference_mode()
def measured(casts: Casts, asked: Asked, rates: Rates) -> None:
    """Device events around single calls: eager steps and prefills, then a replayed step at each context."""
    library = modeling(casts.device)
    with quiet():
        model = library_model(casts)
        rates.about |= {"kernels": bound_kernels(library), "attention": "eager", "experts": "grouped_mm"}
        vocab = casts.checkpoint.config.vocab_size

        def prompt(tokens: int) -> Tensor:
            return torch.tensor(asked.prompts(1, tokens, vocab), device=casts.device)

        for tokens in asked.prefills:
            ids = prompt(tokens)
            t = events_ms(lambda ids=ids: _Sequence(model, library)(ids), PREFILL_REPEATS, warm=2)
            rates.add("eager", "prefill", (1, tokens), t)
        for tokens in asked.contexts:
            sequence = _filled(_Sequence(model, library), prompt(tokens))
            token = prompt(1)
            rates.add("eager", "decode", (1, tokens), events_ms(lambda s=sequence, x=token: s(x), asked.steps))
        for tokens in asked.contexts:
            rates.attempt("graph", lambda n=tokens: _replayed(model, library, prompt(n), rates))


def _filled(sequence: _Sequence, ids: Tensor) -> _Sequence:
    for start in range(0, ids.shape[1], PIECE):
        sequence(ids[:, start : start + PIECE])
    return sequence


def _replayed(model: Any, library: Any, ids: Tensor, rates: Rates) -> None:
    sequence, token, masks = _filled(_Sequence(model, library), ids), ids[:, :1].clone(), lone_masks(ids.device)
    rates.add("graph", "decode", (1, ids.shape[1]), _graph_ms(lambda: sequence(token, masks), token))


def lone_masks(device: torch.device) -> dict[str, Tensor | None]:
    """The masks that the library makes for one token: it sees every key, so zero is added to each score.

    5.17 makes that zero on the host and copies it (`masking_utils.eager_mask`), which no graph can capture.
    """
    return {"full_attention": torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=device), "linear_attention": None}


def _graph_ms(call: Callable[[], object], changed: Tensor) -> Timed:
    def once() -> None:
        call()

    for _ in range(2):
        once()
    return events_ms(captured(once, (changed,)), REPLAYS)

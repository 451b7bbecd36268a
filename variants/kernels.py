"""Which implementations of an operation there are besides torch's, and where each is: one line an entry.

An entry names a function of one module, which is imported when a variant asks for it and never before. The function
binds one place: it reads the rules that say how the kernel rounds (`variants.impl_rules`), refuses with one line what
the kernel cannot do, and returns what the layer calls. short_conv and delta_rule pass their result through their site
themselves (`Binder.at`), and then what the slots carry; the layer does so for all others. What each returns, with rows
as in `Batch`:

- linear(rule) -> f(x, weight): x and weight [N, K] in the rule's input format; the result in its storage.
- rms_norm(b, site, weight, eps) -> f(stored, unrounded): the norm of a residual sum, which arrives both ways.
- gated_rms_norm(b, weight, eps) -> f(o, gate): o, gate [B, T, H, V], the gate before its sigmoid.
- short_conv(b, weight) -> f(raw, batch, state): raw [B, T, C] before the convolution, C = q, k and v; the result after
  SiLU; the slots' inputs are updated in place.
- delta_rule(b, gate) -> f(q, k, v, g, beta, batch, state): q and k [B, T, H, K] raw where `q_l2norm` is inside, g the
  gate's projection where `decay_gate` is, beta before its sigmoid where `beta` is; the slots' states are updated in
  place. gate: (A_log [H, 1], dt_bias [H, K]).
- flash(b) -> f(q, k, v, batch): keys and values expanded, [B, L, H, .]; the result [B, T, H, V].
- absorb(b), expand(b) -> f(x, weight): x [B, T, H, N] by each head's weight [H, N, M], into the latent and out of it.
- absorbed(b) -> f(q_latent, q_pe, batch, state): over the slots' latent; the result o_latent [B, T, H, R].
- silu_and_mul(b) -> f(gate, up): the product of silu(gate) and up.
- route(b, bias) -> f(logits): logits [N, E]; chosen ids [N, k] and their float32 weights.
- experts(b, w13, w2) -> f(x, ids, weights): x [N, D], ids and float32 weights [N, k]; the routed sum [N, D].
"""

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

from variants.axes import Impl
from variants.errors import DeviceError, UsageError

TRITON = "variants.bind_triton"
FLA = "variants.bind_fla"
VLLM = "variants.bind_vllm"
ROW = "variants.bind_row"
NATIVE = "variants.bind_native"
INDUCTOR = "variants.bind_inductor"

# What a set of kernels has that leaves no operation to torch.
WHOLE = (
    "linear", "rms_norm", "gated_rms_norm", "silu_and_mul", "short_conv", "delta_rule", "flash", "absorb", "absorbed",
    "expand", "route", "experts",
)  # fmt: skip

SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # what switches torch.compile off, set to 1
# What torch.compile writes kernels for; products, attention and the chunked delta rule it leaves to libraries.
COMPILED = ("rms_norm", "gated_rms_norm", "silu_and_mul", "short_conv", "delta_rule", "route")

# (operation, implementation): module and function. An axis of `ImplAxes` covers the operations of OPERATIONS.
KERNELS: dict[tuple[str, Impl], str] = {
    ("linear", Impl.triton): f"{TRITON}:linear",
    ("router", Impl.triton): f"{TRITON}:linear",
    ("rms_norm", Impl.triton): f"{TRITON}:rms_norm",
    ("gated_rms_norm", Impl.triton): f"{TRITON}:gated_rms_norm",
    ("short_conv", Impl.triton): f"{TRITON}:short_conv",
    ("delta_rule", Impl.triton): f"{TRITON}:delta_rule",
    ("flash", Impl.triton): f"{TRITON}:flash",
    ("absorbed", Impl.triton): f"{TRITON}:absorbed",
    ("experts", Impl.triton): f"{TRITON}:experts",
    ("rms_norm", Impl.fla): f"{FLA}:rms_norm",
    ("gated_rms_norm", Impl.fla): f"{FLA}:gated_rms_norm",
    ("short_conv", Impl.fla): f"{FLA}:short_conv",
    ("delta_rule", Impl.fla): f"{FLA}:delta_rule",
    **{(operation, Impl.vllm): f"{VLLM}:{operation}" for operation in WHOLE},
    ("router", Impl.vllm): f"{VLLM}:linear",
    ("router", Impl.row): f"{ROW}:linear",
    **{(operation, Impl.row): f"{ROW}:{operation}" for operation in WHOLE},
    ("router", Impl.native): f"{NATIVE}:linear",
    **{(o, Impl.native): f"{NATIVE}:{o}" for o in WHOLE if o not in ("absorb", "absorbed", "expand")},
    **{(o, Impl.inductor): f"{INDUCTOR}:{o}" for o in COMPILED},
}
OPERATIONS: dict[str, tuple[str, ...]] = {
    "kda": ("delta_rule",),
    "mla": ("flash", "absorb", "absorbed", "expand"),
    "conv": ("short_conv",),
    "norms": ("rms_norm", "gated_rms_norm"),
    "experts": ("experts",),
    "router": ("router", "route"),
    "linear": ("linear",),
    "swiglu": ("silu_and_mul",),
}
# What an implementation needs: a package, and what to do where it is not there.
PACKAGES = {
    Impl.triton: ("triton", "pip install triton"),
    Impl.row: ("triton", "pip install triton"),
    Impl.fla: ("fla", "pip install neartie[fla]"),
    Impl.vllm: ("vllm", "install vLLM 0.26 beside neartie"),
}


def has(axis: str, impl: Impl) -> bool:
    """Whether an axis of `ImplAxes` may be set to this implementation."""
    return impl is Impl.torch or any((op, impl) in KERNELS for op in OPERATIONS[axis])


def choices(axis: str) -> tuple[str, ...]:
    """The implementations that an axis may name."""
    return tuple(impl.name for impl in Impl if has(axis, impl))


def refuse(axis: str, impl: Impl, why: str) -> NoReturn:
    """Raises UsageError: what an implementation cannot do on an axis of `ImplAxes`, and what would work."""
    raise UsageError(f"variant.impl.{axis}={impl.name}: {why}, or choose impl.{axis}=torch")


def kernel(operation: str, impl: str) -> Callable[..., Any]:
    """The function that binds an operation; imports its module. Raises UsageError where there is none."""
    entry = KERNELS.get((operation, Impl[impl]))
    if entry is None:
        there = ", ".join(i.name for o, i in KERNELS if o == operation)
        raise UsageError(f"impl {impl} has no {operation}; choose torch{there and ', '}{there}")
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def check_environment(impls: frozenset[str], device: str) -> None:
    """Raise DeviceError, in one line, for an implementation whose package or device is not there.

    impls: names of `Impl` that a recipe uses. device: where the weights are, `cpu` or `cuda:0`. Our Triton kernels also
    run on the CPU under Triton's interpreter, which TRITON_INTERPRET=1 chooses before the start.
    """
    for name in sorted(impls):
        package, remedy = PACKAGES.get(Impl[name], ("torch", "pip install torch"))
        if find_spec(package) is None:
            raise DeviceError(
                f"impl {name} needs the package {package}, which is not installed: {remedy}, or choose torch"
            )
        if name == Impl.native.name:
            _check_native(device)
        if name == Impl.inductor.name:
            _check_inductor(device)
        if name in (Impl.torch.name, Impl.native.name, Impl.inductor.name) or device != "cpu":
            continue
        if name not in (Impl.triton.name, Impl.row.name):
            raise DeviceError(f"impl {name} needs a CUDA device, got {device}: set device=cuda, or choose impl torch")
        from variants.ops.launch_triton import INTERPRETED

        if not INTERPRETED:
            raise DeviceError(
                f"impl {name} needs a CUDA device, got cpu: set device=cuda, set TRITON_INTERPRET=1 before the start "
                "to run it slowly on the CPU, or choose impl torch"
            )


def _check_inductor(device: str) -> None:
    """Inductor writes C++ for a CPU and Triton for a GPU; switched off, torch's lines would run one by one in its name.

    engine=vllm switches it off for its process.
    """
    from variants.ops.native_library import compiler

    if off := next((name for name in SWITCHED_OFF if os.environ.get(name) == "1"), None):
        raise DeviceError(
            f"impl inductor needs torch.compile, and {off}=1 switches it off: unset it, and run engine=vllm, which "
            "sets it, in another process; or choose impl torch"
        )
    if device == "cpu":
        compiler()
    elif find_spec("triton") is None:
        raise DeviceError("impl inductor on a GPU needs the package triton: pip install triton, or choose torch")


def _check_native(device: str) -> None:
    """Compiles the CPU kernels where they are not kept yet."""
    from variants.ops.native_library import library

    if device != "cpu":
        raise DeviceError(f"impl native runs on the CPU, got {device}: set device=cpu, or choose impl torch")
    library()

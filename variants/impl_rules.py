"""What an implementation other than torch does to the rules: which sites a kernel swallows, and how it rounds inside.

A swallowed site keeps its rule, so that the recipe says how the kernel rounds there, and `inside` names the site at
which its value comes out. A kernel sums in float32 whatever it reads. What a kernel cannot round is refused here,
before anything is loaded, with what would work.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from variants import impl_rules_inductor, impl_rules_native, impl_rules_row, impl_rules_vllm
from variants.axes import (
    ChunkForm,
    Impl,
    ImplAxes,
    KdaCore,
    L2NormEps,
    MlaCore,
    NormVariance,
    Store,
    TileOrder,
    Variant,
)
from variants.dtypes import DType
from variants.errors import UsageError
from variants.kernels import choices, has, refuse
from variants.recipe import Rule
from variants.sites import CHUNK_SITES, rule_key

Rules = dict[str, Rule]
PHASES = ("prefill", "decode")
EXPERT_SITES = ("expert_gate_up", "expert_silu", "expert_act", "expert_down_in", "expert_down", "expert_out")
L2_SITES = ("q_l2norm", "k_l2norm")
# Swallowed sites at which a kernel can round; at the others it keeps float32.
ROUNDED_INSIDE = {*EXPERT_SITES, *CHUNK_SITES, *(f"{s}.prefill" for s in L2_SITES)}
# What the engines' own chunked kernels store in bf16 inside a chunk: everything that has a name there.
CHUNK_FORMS: dict[ChunkForm, DType | None] = {
    ChunkForm.plain: None,
    ChunkForm.vllm: DType.bf16,
    ChunkForm.fla: DType.bf16,
}
FORM_NUMBER = {form: number for number, form in enumerate(ChunkForm)}
KDA_FORMS: dict[Impl, tuple[ChunkForm, ...]] = {
    Impl.triton: tuple(ChunkForm),
    Impl.row: tuple(ChunkForm),
    Impl.fla: (ChunkForm.fla,),
    Impl.vllm: (ChunkForm.vllm,),
    Impl.native: (ChunkForm.plain,),
}
REFINED = {
    Impl.vllm: impl_rules_vllm.refined,
    Impl.row: impl_rules_row.refined,
    Impl.native: impl_rules_native.refined,
}
GATES = {
    Impl.triton: ("decay_gate", "beta"),
    Impl.row: ("decay_gate", "beta"),
    Impl.native: ("decay_gate", "beta"),
    Impl.fla: ("decay_gate",),
    Impl.vllm: ("decay_gate",),
}
FUSED = ("norms", "conv", "kda")  # operations with calls that fused_elementwise joins
TILED: dict[Impl, tuple[MlaCore, ...]] = dict.fromkeys(
    (Impl.triton, Impl.row, Impl.vllm), (MlaCore.flash, MlaCore.absorbed)
)


def implemented(variant: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The rules of a variant with every operation given to the implementation that its axes name.

    Raises UsageError for a choice that there is not, or that rounds in another way than the recipe says.
    """
    out = dict(rules)
    if variant.kda.chunk_form is not ChunkForm.plain and variant.impl.kda is Impl.torch:
        out |= _torch_form(variant, rules)
    for axis in fields(ImplAxes):
        impl = getattr(variant.impl, axis.name)
        if not has(axis.name, impl):
            refuse(axis.name, impl, f"there is none; choose {', '.join(choices(axis.name))}")
        if variant.fused_elementwise and impl is not Impl.torch and axis.name in FUSED:
            refuse(axis.name, impl, "fused_elementwise joins calls of torch alone; remove it")
        if impl is Impl.inductor:
            out |= impl_rules_inductor.compiled(axis.name, variant, out)
        elif impl is not Impl.torch:
            out |= _AXES[axis.name](variant, impl, out)
            out |= REFINED[impl](axis.name, variant, out) if impl in REFINED else {}
    return out


def _torch_form(v: Variant, rules: Mapping[str, Rule]) -> Rules:
    """The chunked core of torch in an engine's form: its roundings at every site inside, and of normalised q and k."""
    form, inner = v.kda.chunk_form, CHUNK_FORMS[v.kda.chunk_form]
    if form is not ChunkForm.vllm or v.kda.chunk_size != 64 or rules["decay_gate"].accum is not DType.f32:
        raise UsageError(
            f"variant.kda.chunk_form={form.name}: torch has vllm's, in chunks of 64 and in float32; set "
            "impl.kda=triton or fla, kda.chunk_size=64 and a stream of f32 or narrower, or name roundings by override"
        )
    phases = [p for p in PHASES if getattr(v.kda, p) is KdaCore.chunk]
    keys = [*CHUNK_SITES, *(rule_key(s, p) for s in L2_SITES for p in phases)]
    out = {k: replace(rules[k], output=inner, storage=inner) for k in keys}
    number = ("form", FORM_NUMBER[form])
    cores = {f"kda_core.{p}": rules[f"kda_core.{p}"] for p in phases}
    return out | {k: replace(r, options=(*r.options, number)) for k, r in cores.items()}


def check_inside(exceptions: Mapping[tuple[str, int], Rule]) -> None:
    """Refuse a rounding that an override asks for inside a kernel that cannot do it."""
    for (key, layer), rule in exceptions.items():
        rounds = key in ROUNDED_INSIDE or rule.impl == Impl.inductor.name
        if rule.inside and not rounds and not _wide(rule.output):
            raise UsageError(
                f"variant.override.{key} at layer {layer}: impl {rule.impl} computes it inside {rule.inside} and keeps "
                "float32 there; choose impl torch for that operation, or remove the override"
            )


def _linear(v: Variant, impl: Impl, rules: Rules) -> Rules:
    other = ("router", "expert_gate_up", "expert_down")
    if v.weights_by_column:
        refuse("linear", impl, "weights_by_column is a layout of torch's products; remove it")
    return {k: _product(v, "linear", impl, r) for k, r in rules.items() if _is_product(r) and k not in other}


def _router(v: Variant, impl: Impl, rules: Rules) -> Rules:
    return {"router": _product(v, "router", impl, rules["router"])}


def _is_product(rule: Rule) -> bool:
    return rule.algorithm.startswith("gemm")


def _product(v: Variant, axis: str, impl: Impl, rule: Rule, *, inside: str = "") -> Rule:
    """A product of operands in their own format, summed in float32 and rounded once to its storage."""
    if rule.accum is DType.f64:
        refuse(axis, impl, "no kernel multiplies float64; set gemm and moe.router to f32 or narrower")
    options = (("tf32", 1),) if v.tf32 and rule.input is DType.f32 else ()
    return replace(rule, accum=DType.f32, algorithm="gemm", impl=impl.name, inside=inside, options=options)


def _norms(v: Variant, impl: Impl, rules: Rules) -> Rules:
    _float32("norms", impl, rules["input_norm"])
    if v.norm.variance is NormVariance.mixed:
        refuse("norms", impl, "it normalises the tensor whose variance it takes; set norm.variance=stored or pre_store")
    if impl is Impl.fla and any(r.algorithm.endswith("_twice") for r in rules.values()):
        refuse("norms", impl, "it rounds once; set norm.rounding=once")
    keys = [k for k, r in rules.items() if r.algorithm.startswith("rms_norm")]
    out = {k: replace(rules[k], impl=impl.name) for k in keys}
    return out | {"o_norm": replace(rules["o_norm"], impl=impl.name, algorithm="sigmoid")}


def _conv(v: Variant, impl: Impl, rules: Rules) -> Rules:
    _float32("conv", impl, rules["short_conv"])
    if not _wide(rules["conv_sum"].output):
        refuse("conv", impl, "it rounds once, after SiLU; set elementwise.conv=once")
    return {
        "conv_state": replace(rules["conv_state"], impl=impl.name),
        "conv_sum": replace(rules["conv_sum"], impl=impl.name, inside="short_conv"),
        "short_conv": replace(rules["short_conv"], impl=impl.name, algorithm="silu"),
    }


def _kda(v: Variant, impl: Impl, rules: Rules) -> Rules:
    cores = {p: getattr(v.kda, p) for p in PHASES}
    _float32("kda", impl, rules["decay_gate"])
    for phase, core in cores.items():
        if core not in (KdaCore.recurrent, KdaCore.chunk):
            refuse("kda", impl, f"it has no {core.name}; set kda.{phase} to recurrent or chunk")
    if v.kda.state not in (Store.keep, Store.f32):
        refuse("kda", impl, "it carries a float32 state; set kda.state=f32 or keep")
    if v.kda.l2_eps is not L2NormEps.eps_1e6:
        refuse("kda", impl, "its L2 norm has 1e-6 under the root; set kda.l2_eps=eps_1e6")
    chunked = KdaCore.chunk in cores.values()
    if chunked and v.kda.chunk_size != 64:
        refuse("kda", impl, "its chunks have 64 tokens; set kda.chunk_size=64")
    if chunked and v.kda.chunk_form not in KDA_FORMS[impl]:
        refuse("kda", impl, f"its chunks round as {KDA_FORMS[impl][0].name} does; set kda.chunk_form to that")
    gates = [s for s in GATES[impl] if _wide(rules[s].output)]
    out = {s: replace(rules[s], impl=impl.name, inside="kda_core") for s in gates}
    out["kda_state"] = replace(rules["kda_state"], impl=impl.name)
    out |= {f"kda_core.{p}": _core(v, impl, rules[f"kda_core.{p}"], core) for p, core in cores.items()}
    out |= {k: r for p, core in cores.items() for k, r in _l2norms(v, impl, rules, p, core).items()}
    if chunked:
        inner = CHUNK_FORMS[v.kda.chunk_form]
        stored = {"output": inner, "storage": inner} if inner else {}
        out |= {s: replace(rules[s], impl=impl.name, inside="kda_core", **stored) for s in CHUNK_SITES}
    return out


def _core(v: Variant, impl: Impl, rule: Rule, core: KdaCore) -> Rule:
    form = (("form", FORM_NUMBER[v.kda.chunk_form]),) if v.kda.chunk_form is not ChunkForm.plain else ()
    options = (*rule.options, *form) if core is KdaCore.chunk else rule.options
    return replace(rule, impl=impl.name, algorithm=core.name, options=options)


def _l2norms(v: Variant, impl: Impl, rules: Rules, phase: str, core: KdaCore) -> Rules:
    """The chunked kernels store normalised q and k as named, the step by step ones keep them in float32."""
    keys = [rule_key(s, phase) for s in L2_SITES]
    given = {k: replace(rules[k], impl=impl.name, inside="kda_core") for k in keys}
    if core is KdaCore.chunk:
        inner = CHUNK_FORMS[v.kda.chunk_form]
        if impl is Impl.fla and rules["short_conv"].storage is not inner:  # it stores what it reads
            if rules[keys[0]].output is not inner:
                refuse("kda", impl, "its chunks read bf16; set kda.inputs=bf16, or gemm=bf16")
            return {}
        return given if inner is None else {k: replace(r, output=inner, storage=inner) for k, r in given.items()}
    return {k: r for k, r in given.items() if _wide(r.output)}


def _mla(v: Variant, impl: Impl, rules: Rules) -> Rules:
    _float32("mla", impl, rules["kv_a_norm"])
    if v.mla.tile_order is not TileOrder.forward:
        refuse("mla", impl, "its recipe names no order of tiles but the first first; set mla.tile_order=forward")
    out: Rules = {}
    for phase in PHASES:
        core = getattr(v.mla, phase)
        if core not in TILED.get(impl, tuple(MlaCore)):
            refuse("mla", impl, f"it has no {core.name}; set mla.{phase} to flash or absorbed")
        rule = rules[f"mla_core.{phase}"]
        probs = replace(rules[f"mla_probs.{phase}"], impl=impl.name)
        out[f"mla_probs.{phase}"] = replace(probs, inside="o_latent" if core is MlaCore.absorbed else "mla_core")
        if core is MlaCore.absorbed:
            out["o_latent"] = replace(rules["o_latent"], impl=impl.name)
        else:
            out[f"mla_core.{phase}"] = replace(rule, impl=impl.name, algorithm=core.name)
    return out


def _experts(v: Variant, impl: Impl, rules: Rules) -> Rules:
    out = {s: replace(rules[s], impl=impl.name, inside="routed") for s in EXPERT_SITES}
    for s in ("expert_gate_up", "expert_down"):
        out[s] = _product(v, "experts", impl, rules[s], inside="routed")
    return out | {"routed": replace(rules["routed"], impl=impl.name)}


def _swiglu(v: Variant, impl: Impl, rules: Rules) -> Rules:
    silu = {f"{n}_silu": replace(rules[f"{n}_silu"], impl=impl.name, inside=f"{n}_act") for n in ("mlp", "shared")}
    return silu | {f"{n}_act": replace(rules[f"{n}_act"], impl=impl.name) for n in ("mlp", "shared")}


def _float32(axis: str, impl: Impl, rule: Rule) -> None:
    if rule.accum is not DType.f32:
        refuse(axis, impl, f"it computes in float32 and the recipe in {rule.accum.name}; set stream to f32 or narrower")


def _wide(output: DType | None) -> bool:
    return output is None or output.precision >= DType.f32.precision


_AXES: dict[str, Callable[[Variant, Impl, Rules], Rules]] = {
    "kda": _kda,
    "mla": _mla,
    "conv": _conv,
    "norms": _norms,
    "experts": _experts,
    "router": _router,
    "linear": _linear,
    "swiglu": _swiglu,
}

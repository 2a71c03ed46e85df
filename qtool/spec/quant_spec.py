"""QuantSpec: how a tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qtool.dtypes import DTYPES, TARGETS, DType, DTypeLike, names, resolve, resolve_target
from qtool.errors import SpecError
from qtool.spec.granularity import Blocked, Granularity, PerTensor, Tiled
from qtool.spec.methods import SEARCHES, symmetry

SCALE_DTYPES = tuple(
    DTYPES[n] for n in ("float32", "float16", "bfloat16", "float8e8m0", "float8e4m3fn")
)
MX_RULES = ("floor", "ceil", "even", "rceil", "rceil-7.25")
# The rules, floor aside, of least squared error on the weights of all-MiniLM-L6-v2 in blocks of 32;
# even for the types that are not named.
_BEST_RULES = {
    "float4e2m1": "rceil-7.25",
    **{dtype.name: "rceil" for dtype in TARGETS if dtype.is_small_float and dtype.bits == 8},
}
PRECISIONS = tuple(DTYPES[n] for n in ("float32", "float16", "bfloat16"))


@dataclass(frozen=True, slots=True, init=False)
class QuantSpec:
    """How one tensor is quantized. Contradictions are refused at construction.

    dtype: target element type.
    granularity: PerTensor(), PerAxis(axis), Blocked(axis, block_size) or Tiled(shape).
    symmetric: True: the grid is centred on zero; False: it spans [min, max] of the data;
        None: by `method` where that says it, else True for signed and float types.
    method: "absmax" (symmetric), "minmax" (asymmetric), "percentile:P", 0 < P <= 100, "entropy" of
        integer types, see scales.entropy, or "mse", see scales.search. None: mse for types of up to
        4 bits and for float8e8m0 scales without an mx_rule, where codes are computed as the search
        does; else the one of the first two that fits `symmetric`.
    scale_dtype: storage type of a chosen scale; None: the tensor's own float type.
    global_scale: the stored float8e4m3fn scales stand under one float32 scale of the tensor, see
        scales.global_scale: x_hat = code * (scale * global_scale).
    bias: readers compute x_hat = (code - lowest code) * scale + bias, with what -zero_point * scale
        is for such codes, rounded to the scale's type.
    mx_rule: how a float8e8m0 scale follows from the largest magnitude; see scales.powers. None:
        the rule of least error for dtype, or, with mse, whatever the search finds.
    precision: type of the division x / y_scale; None: float32 for scales that qtool chooses, the
        standard's default for given ones.
    saturate: as in QuantizeLinear; False is for the float8 types.
    narrow_range: leave the lowest integer code unused: [-127, 127] for int8.
    semantics: "onnx" (QuantizeLinear), "onednn" (Quantize: the zero point is added before
        rounding) or "dynamic" (DynamicQuantizeLinear chooses scale and zero point).
    nonfinite: "error" refuses NaN and Inf in a tensor, "allow" saturates and counts them.
    negative_scale: accept given scales below zero, and choose the sign of others, so that the side
        with one code more is the one that needs it.

    Raises SpecError naming the argument.
    """

    dtype: DType
    granularity: Granularity
    symmetric: bool
    method: str
    scale_dtype: DType | None
    global_scale: bool
    bias: bool
    mx_rule: str | None
    precision: DType | None
    saturate: bool
    narrow_range: bool
    semantics: str
    nonfinite: str
    negative_scale: bool

    def __init__(
        self,
        dtype: DTypeLike,
        granularity: Granularity,
        *,
        symmetric: bool | None = None,
        method: str | None = None,
        scale_dtype: DTypeLike | None = None,
        precision: DTypeLike | None = None,
        saturate: bool = True,
        global_scale: bool = False,
        bias: bool = False,
        mx_rule: str | None = None,
        narrow_range: bool = False,
        semantics: str = "onnx",
        nonfinite: str = "error",
        negative_scale: bool = False,
    ) -> None:
        target = resolve_target(dtype)
        is_symmetric = symmetry(target, symmetric, method, semantics)
        fields = {
            "dtype": target,
            "granularity": granularity,
            "symmetric": is_symmetric,
            "method": method or "",
            "scale_dtype": _one_of("scale_dtype", scale_dtype, SCALE_DTYPES),
            "global_scale": global_scale,
            "bias": bias,
            "mx_rule": mx_rule,
            "precision": _one_of("precision", precision, PRECISIONS),
            "saturate": saturate,
            "narrow_range": narrow_range or (semantics == "dynamic" and target.name == "int8"),
            "semantics": semantics,
            "nonfinite": nonfinite,
            "negative_scale": negative_scale,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not method:
            object.__setattr__(self, "method", self._default_method())
        if mx_rule is None and self.method not in SEARCHES:
            object.__setattr__(self, "mx_rule", self.exponent_rule)
        self._check()

    def at(self, granularity: Granularity) -> QuantSpec:
        """The same spec with another granularity."""
        return replace(self, granularity=granularity)

    @property
    def qmin(self) -> float:
        """Lowest value that a code may take: the type's, or one more with narrow_range."""
        return self.dtype.qmin + self.narrow_range

    @property
    def exponent_rule(self) -> str | None:
        """How the first float8e8m0 scale follows from the largest magnitude; None for others."""
        if not self.symmetric or self.scale_dtype != DTYPES["float8e8m0"]:
            return None
        return self.mx_rule or _BEST_RULES.get(self.dtype.name, "even")

    @property
    def percentile(self) -> float | None:
        """P of method "percentile:P", in percent."""
        name, _, value = self.method.partition(":")
        return float(value) if name == "percentile" else None

    @property
    def needs_distribution(self) -> bool:
        """Whether the range of a group depends on more than its minimum and maximum."""
        return self.method == "entropy" or self.percentile is not None

    @property
    def has_zero_point(self) -> bool:
        """Whether a scale chosen by this spec comes with a zero point other than 0."""
        return not self.symmetric or self.dtype.kind == "uint"

    def storage_dtype(self, source: DType, given: DType | None = None) -> DType:
        """The type in which a scale is stored: scale_dtype, or else that of a given scale, or
        else the source's own float type (float32 for float64 and int32, and for
        DynamicQuantizeLinear)."""
        if self.scale_dtype is not None:
            return self.scale_dtype
        if given is not None and given in SCALE_DTYPES:
            return given
        keeps = source.name in ("float16", "bfloat16") and self.semantics != "dynamic"
        return source if keeps else DTYPES["float32"]

    def _default_method(self) -> str:
        is_coarse = self.dtype.bits <= 4 or self.scale_dtype == DTYPES["float8e8m0"]
        if is_coarse and self.mx_rule is None and not self._obstacle_to_search():
            return "mse"
        return "absmax" if self.symmetric else "minmax"

    def _obstacle_to_search(self) -> str | None:
        """What makes codes differ from those that a search measures."""
        if self.precision not in (None, DTYPES["float32"]):
            return f"precision {self.precision}"
        if self.semantics != "onnx":
            return f"semantics {self.semantics}"
        return None if self.saturate else "saturation turned off"

    def _check(self) -> None:
        obstacle = self._obstacle_to_search()
        if self.method in SEARCHES and obstacle:
            raise SpecError(
                "method", f"{self.method} does not go with {obstacle}", "use absmax or minmax"
            )
        if self.method in SEARCHES and self.mx_rule is not None:
            raise SpecError(
                "mx_rule",
                f"{self.method} compares scales instead of following a rule",
                "leave one of them out",
            )
        if self.nonfinite not in ("error", "allow"):
            raise SpecError("nonfinite", f"{self.nonfinite!r} is unknown", "use error or allow")
        if self.narrow_range and not self.dtype.is_integer:
            raise SpecError(
                "narrow_range", f"{self.dtype} is a float type", "it is for integer types"
            )
        if not self.saturate and not (self.dtype.is_small_float and self.dtype.bits == 8):
            raise SpecError(
                "saturate",
                f"{self.dtype} always saturates",
                "doing without is for the float8 types",
            )
        self._check_scales()
        if self.semantics == "onednn":
            self._check_onednn()
        if self.semantics == "dynamic":
            self._check_dynamic()

    def _check_scales(self) -> None:
        storage = self.scale_dtype.name if self.scale_dtype else ""
        if self.global_scale and (storage != "float8e4m3fn" or not self.symmetric):
            raise SpecError(
                "global_scale",
                "it stands over float8e4m3fn scales of a symmetric grid",
                "use it with --scale-dtype float8e4m3fn",
            )
        if self.mx_rule is None:
            return
        if self.mx_rule not in MX_RULES:
            raise SpecError("mx_rule", f"{self.mx_rule!r} is unknown", "use " + ", ".join(MX_RULES))
        if storage != "float8e8m0" or not self.symmetric:
            raise SpecError(
                "mx_rule",
                "it chooses the float8e8m0 scales of a symmetric grid",
                "use it with --scale-dtype float8e8m0",
            )
        if self.mx_rule == "rceil-7.25" and self.dtype.name != "float4e2m1":
            raise SpecError("mx_rule", f"rceil-7.25 is for float4e2m1, not {self.dtype}")

    def _check_dynamic(self) -> None:
        if self.dtype.name not in ("uint8", "int8"):
            raise SpecError(
                "dtype",
                "DynamicQuantizeLinear gives uint8 or int8",
                f"use `qtool quantize` for {self.dtype}",
            )
        if self.granularity != PerTensor():
            raise SpecError(
                "granularity", "DynamicQuantizeLinear has one scale per tensor", "use PerTensor()"
            )
        chosen = (self.symmetric, self.needs_distribution, self.scale_dtype, self.precision)
        if any(chosen) or (self.narrow_range and self.dtype.name == "uint8"):
            raise SpecError(
                "dynamic",
                "DynamicQuantizeLinear itself says how to choose the scale",
                "leave all but dtype out",
            )

    def _check_onednn(self) -> None:
        if self.dtype.onednn is None:
            raise SpecError(
                "semantics",
                f"oneDNN Quantize does not produce {self.dtype}",
                "use uint8, int8, float8e4m3fn or float8e5m2",
            )
        if isinstance(self.granularity, Blocked | Tiled):
            raise SpecError(
                "semantics", "oneDNN Quantize has no blocks", "quantize per tensor or per axis"
            )
        if self.precision not in (None, DTYPES["float32"]):
            raise SpecError("precision", "oneDNN Quantize divides in float32", "leave it out")
        if not self.saturate:
            raise SpecError("saturate", "oneDNN Quantize always saturates", "leave it out")


def _one_of(thing: str, value: DTypeLike | None, allowed: tuple[DType, ...]) -> DType | None:
    if value is None or (isinstance(value, int) and value == 0):
        return None
    dtype = resolve(value, thing, allowed)
    if dtype not in allowed:
        raise SpecError(thing, f"{dtype} is not allowed", "use " + names(allowed))
    return dtype

"""Second-order rounding as the textbook has it: one column at a time, the inverse written out.

Source: Frantar et al. 2022, Optimal Brain Compression, arXiv 2208.11580, and GPTQ, 2210.17323.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import Blocked, PerAxis, QuantizedTensor, Tiled

Array = NDArray[Any]


def correlated(rng: np.random.Generator, rows: int, inputs: int, factors: int = 8) -> Array:
    """Inputs of a layer as real ones are: of very different sizes, and far from independent."""
    common = rng.standard_normal((rows, factors)) @ rng.standard_normal((factors, inputs))
    sizes = np.exp(rng.normal(0, 0.7, inputs))
    return ((common + rng.standard_normal((rows, inputs))) * sizes).astype(np.float32)


def damped(hessian: Array, damping: float = 0.01) -> Array:
    """H with a part of its mean diagonal added, that of inputs which are always zero replaced."""
    diagonal = np.diag(hessian)
    live = diagonal > 0
    mean = diagonal[live].mean() if live.any() else 1.0
    return hessian + np.diag(np.where(live, damping * mean, mean))


def spread(values: Array, tensor: QuantizedTensor) -> Array:
    """A scale or zero point for each element."""
    shape, granularity = tensor.y.shape, tensor.spec.granularity
    if isinstance(granularity, Tiled):
        values = values.repeat(granularity.rows, -2).repeat(granularity.columns, -1)
        return values[..., : shape[-2], : shape[-1]]
    if isinstance(granularity, Blocked):
        values = values.repeat(granularity.block_size, granularity.axis)
        return values.take(np.arange(shape[granularity.axis]), granularity.axis)
    if isinstance(granularity, PerAxis):
        values = values.reshape([-1 if i == granularity.axis else 1 for i in range(len(shape))])
    return np.broadcast_to(values, shape)


def nearest(x: Array, scale: Array, zero: Array, tensor: QuantizedTensor) -> Array:
    """Codes of float32 values, as float64."""
    spec = tensor.spec
    divide = tensor.precision.numpy
    with np.errstate(all="ignore"):
        quotient = (x.astype(divide) / scale.astype(divide)).astype(np.float64)
    if spec.semantics == "onednn":
        return np.clip(np.rint(quotient + zero), spec.qmin, spec.dtype.qmax)
    if spec.dtype.is_integer:
        return np.clip(np.rint(quotient) + zero, spec.qmin, spec.dtype.qmax)
    clipped = np.clip(quotient, -spec.dtype.qmax, spec.dtype.qmax)
    return clipped.astype(np.float32).astype(spec.dtype.numpy).astype(np.float64)


def obq(
    weight: Array, hessian: Array, tensor: QuantizedTensor, *, damping: float, act_order: bool
) -> Array:
    """(outputs, inputs) codes, as float64, of a weight (outputs, inputs, ...), or, where scales lie
    so, of (inputs, outputs), with the scales of `tensor`."""
    scale = spread(tensor.scale.astype(np.float32), tensor)
    if tensor.global_scale is not None:
        scale = scale * np.float32(tensor.global_scale)
    zero = np.zeros(weight.shape)
    if tensor.zero_point is not None:
        zero = spread(tensor.zero_point.astype(np.float64), tensor)
    w, scale, zero = (matrix(a, tensor) for a in (weight, scale, zero))
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
    inverse = np.linalg.inv(damped(hessian, damping)[order][:, order])
    rest = w[:, order].astype(np.float64)
    codes = np.empty(w.shape)
    for column in order:
        q = nearest(rest[:, 0].astype(np.float32), scale[:, column], zero[:, column], tensor)
        codes[:, column] = q
        value = ((q - zero[:, column]).astype(np.float32) * scale[:, column]).astype(np.float64)
        error = (rest[:, 0] - value) / inverse[0, 0]
        rest = rest[:, 1:] - np.outer(error, inverse[0, 1:])
        inverse = inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0]
        inverse = inverse[1:, 1:]
    return codes


def matrix(values: Array, tensor: QuantizedTensor) -> Array:
    """A weight as (outputs, inputs): outputs come first, unless its scales say otherwise."""
    granularity = tensor.spec.granularity
    inputs_first = (isinstance(granularity, PerAxis) and granularity.axis == 1) or (
        isinstance(granularity, Blocked) and granularity.axis == 0
    )
    return values.T if inputs_first else values.reshape(len(values), -1)


def output_error(weight: Array, estimate: Array, hessian: Array) -> float:
    """sqrt(tr(D H D^T) / tr(W H W^T)), D the error of an estimate of W (outputs, inputs)."""
    w = weight.astype(np.float64)
    d = estimate.astype(np.float64) - w
    return float(np.sqrt(np.sum((d @ hessian) * d) / np.sum((w @ hessian) * w)))

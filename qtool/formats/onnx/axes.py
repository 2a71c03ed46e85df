"""Along which axes an operator reads a weight, and where axes are before a weight is laid out anew.

Source: ONNX Operators.md; com.microsoft ContribOperators.md for the fused ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from onnx import NodeProto

from qtool.formats.onnx.graph import attribute, integers
from qtool.spec import Shape

# The axis of the output channels, and the one that is summed over; None where there is none.
Axes = tuple[int | None, int | None]
# For each axis of a tensor the axis that it was before, None where it was none.
Origins = Sequence[int | None]
# The values of a small tensor of integers that the model stores; None for any other.
Integers = Callable[[str], list[int] | None]

RECURRENT = ("LSTM", "GRU", "RNN")
_MATRIX = ("MatMul", "FusedMatMul", "Gemm")
_CONVOLUTIONS = ("Conv", "FusedConv", "DeformConv")


def operator_axes(node: NodeProto, index: int, shape: Shape) -> Axes | None:
    """The axes of a weight of that shape at that input of a node; None for an operator that
    multiplies by none there."""
    rank = len(shape)
    operator = (node.op_type, index)
    if rank < 2:
        return None
    if node.op_type in _MATRIX and index < 2:
        is_transposed = attribute(node, "transB" if index else "transA", 0)
        reduced = rank - 2 if bool(index) != bool(is_transposed) else rank - 1
        return (2 * rank - 3 - reduced, reduced)
    if node.op_type in _CONVOLUTIONS and index == 1:
        return (0, 1)
    if operator == ("ConvTranspose", 1):
        return (1, 0)
    if operator == ("Gather", 0):
        axis = attribute(node, "axis", 0) % rank
        return (axis, rank - 1 if axis < rank - 1 else rank - 2)
    if node.op_type in RECURRENT and index in (1, 2) and rank == 3:
        return (1, 2)
    return _einsum(node, index, shape) if node.op_type == "Einsum" else None


def _einsum(node: NodeProto, index: int, shape: Shape) -> Axes | None:
    """By the equation: what the result has from this input alone, and what it has not at all."""
    equation = next((a.s for a in node.attribute if a.name == "equation"), b"")
    left, arrow, result = equation.decode(errors="replace").replace(" ", "").partition("->")
    terms = left.split(",")
    if index >= len(terms):
        return None
    own = _subscripts(terms[index], len(shape))
    others = set("".join(terms[:index] + terms[index + 1 :]))
    if not arrow:
        result = "".join(c for c in set(left) if left.count(c) == 1 and c.isalpha())
    named = [axis for axis, letter in enumerate(own) if letter]
    output = [axis for axis in named if own[axis] in result]
    alone = [axis for axis in output if own[axis] not in others]
    reduced = [axis for axis in named if own[axis] not in result]
    return (_largest(alone or output, shape), _largest(reduced, shape)) if output else None


def _subscripts(term: str, rank: int) -> list[str]:
    """The letter of every axis, "" for those of the ellipsis; none where they do not fit."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    letters = [*before, *[""] * hidden, *after]
    named = [letter for letter in letters if letter]
    return letters if len(letters) == rank and len(named) == len(set(named)) else []


def moved(node: NodeProto, shape: Shape, integers_of: Integers) -> tuple[Shape, Origins] | None:
    """The shape of what a node makes of a weight that it lays out anew, and the axes' origins.

    None for a node that does something else, or whose result's shape is not known.
    An empty tensor's is not.
    """
    rank = len(shape)
    if not rank:
        return None
    if node.op_type in ("Identity", "Cast"):
        return shape, range(rank)
    if node.op_type == "Transpose":
        order = integers(node, "perm") or [*range(rank)][::-1]
        is_valid = sorted(order) == [*range(rank)]
        return (tuple(shape[axis] for axis in order), order) if is_valid else None
    reshape = {"Reshape": _reshape, "Flatten": _flatten}.get(node.op_type)
    if node.op_type in ("Squeeze", "Unsqueeze"):
        reshape = _squeeze if node.op_type == "Squeeze" else _unsqueeze
    new = reshape(node, shape, integers_of) if reshape else None
    if new is None or min(*shape, *new, 1) < 1 or math.prod(new) != math.prod(shape):
        return None
    return new, _origins(shape, new)


def before(axes: Axes | None, origins: Origins) -> Axes | None:
    """The axes of a tensor, in terms of what it was made from."""
    if axes is None:
        return None
    output, reduced = (None if axis is None else origins[axis] for axis in axes)
    return None if output == reduced else (output, reduced)


def _given(node: NodeProto, name: str, integers_of: Integers) -> list[int] | None:
    """An attribute that became the second input later."""
    if len(node.input) > 1 and node.input[1]:
        return integers_of(node.input[1])
    return integers(node, name)


def _reshape(node: NodeProto, shape: Shape, integers_of: Integers) -> Shape | None:
    wanted = _given(node, "shape", integers_of)
    if wanted is None:
        return None
    if not attribute(node, "allowzero", 0):
        copied = [*shape, *[1] * len(wanted)]
        wanted = [size or copied[axis] for axis, size in enumerate(wanted)]
    known = math.prod(size for size in wanted if size != -1)
    return tuple(math.prod(shape) // known if size == -1 and known else size for size in wanted)


def _flatten(node: NodeProto, shape: Shape, integers_of: Integers) -> Shape | None:
    axis = attribute(node, "axis", 1)
    return (math.prod(shape[:axis]), math.prod(shape[axis:]))


def _squeeze(node: NodeProto, shape: Shape, integers_of: Integers) -> Shape | None:
    has_input = len(node.input) > 1 and bool(node.input[1])
    axes = _given(node, "axes", integers_of)
    if axes is None:
        return None if has_input else tuple(size for size in shape if size != 1)
    gone = {axis % len(shape) for axis in axes}
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _unsqueeze(node: NodeProto, shape: Shape, integers_of: Integers) -> Shape | None:
    axes = _given(node, "axes", integers_of)
    if axes is None:
        return None
    rank = len(shape) + len(axes)
    sizes = iter(shape)
    made = {axis % rank for axis in axes}
    return tuple(1 if axis in made else next(sizes, 1) for axis in range(rank))


def _origins(old: Shape, new: Shape) -> Origins:
    """Where the axes of a reshaped tensor come from: of several merged into one, the largest.

    Both shapes are of as many elements, and of more than none.
    """
    found: list[int | None] = [None] * len(new)
    ends = [0, 0]
    while ends[0] < len(old) and ends[1] < len(new):
        starts, sizes = list(ends), [old[ends[0]], new[ends[1]]]
        ends = [end + 1 for end in ends]
        while sizes[0] != sizes[1]:  # the fewest axes of both that hold the same elements
            side = int(sizes[1] < sizes[0])
            sizes[side] *= (old, new)[side][ends[side]]
            ends[side] += 1
        was, now = range(starts[0], ends[0]), range(starts[1], ends[1])
        wide = [axis for axis in now if new[axis] > 1]
        if len(was) == len(now) == 1:
            found[now[0]] = was[0]
        elif len(wide) == 1 or sum(old[axis] > 1 for axis in was) == 1:
            for axis in wide:
                found[axis] = _largest(was, old)
    return found


def _largest(axes: Iterable[int], shape: Shape) -> int | None:
    """The axis of the most elements, of equals the last one; None of none."""
    return max(axes, key=lambda axis: (shape[axis], axis), default=None)

"""Which candidates the search for scales compares, stage by stage."""

from __future__ import annotations

from qtool.dtypes import DType
from qtool.spec import QuantSpec

# Steps of the scale's bits, and the move of the zero point or the turn of the sign; see search.
Candidate = tuple[int, int]

_OCTAVE = 1 << 23  # steps from a float32 to its double
_SHORT = 256  # elements of a group up to which its largest one is near the others


def stages(
    spec: QuantSpec, storage: DType, length: int, *, weighted: bool
) -> list[list[Candidate]]:
    """The candidates of every stage, for groups of that many elements; the very first one is what
    the search begins with.

    The spans were found on the weights of all-MiniLM-L6-v2, where the result is within half a
    percent of the least RMSE: of short groups the best scale is near that of absmax or minmax; in
    long ones outliers may be worth clipping far, as in all whose elements are weighted. Scales of 8
    bits are enumerated.
    """
    moves = [0]
    if spec.negative_scale:
        moves = [0, 1]
    elif not spec.symmetric and spec.dtype.bits == 2:
        moves = [0, -1, 1]
    short = length <= _SHORT
    dtype = spec.dtype
    if storage.bits == 8:
        unit = _OCTAVE >> int(storage.limits.nmant)
        low, high = (-1, 1) if unit == _OCTAVE else (-2, 6)
        low = low if short and not weighted else -5 if unit == _OCTAVE else -24
        coarse, fine = [k * unit for k in range(low, high + 1)], []
    elif not short:
        coarse, fine = _span(-22, 1, 4), [8, 16, 32, 64]
    elif dtype.bits == 2:
        coarse, fine = _span(-8, 1, 4), [8, 16, 32]
    elif dtype.is_integer and dtype.bits <= 4:
        coarse, fine = _span(-5, 3 if spec.negative_scale else 1, 8), [24]
    elif dtype.is_integer:
        coarse, fine = _span(-3, 15, 128), [256]
    elif dtype.bits == 4:
        coarse, fine = _span(-6, 6, 8), [16, 32]
    else:
        coarse, fine = _span(-2, 16, 16), [32]
    if weighted and short and storage.bits != 8:
        coarse = sorted({*coarse, *_span(-8, 1, 12), *_span(-22, -1, 4)})
        fine = sorted({*fine, 8, 16, 32, 48})
    first = [(0, 0), *((k, move) for move in moves for k in coarse if (k, move) != (0, 0))]
    later = [[(-_OCTAVE // part, 0), (_OCTAVE // part, 0)] for part in fine]
    if spec.symmetric:
        return [first, *later]
    far = [(0, sign << k) for k in range(max(dtype.bits - 2, 1)) for sign in (-1, 1)]
    if short:
        return [first, far, *later, far[:2]]
    again = [(k, 0) for k in _span(-3, 2, 4)]
    return [first, far, again, far, *later, far[:2]]


def _span(low: int, high: int, part: int) -> list[int]:
    """Steps of octave / part."""
    return [_OCTAVE * k // part for k in range(low, high + 1)]

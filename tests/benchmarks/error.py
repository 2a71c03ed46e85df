"""Error of qtool's 4-bit and 8-bit weights beside other tools', on the same weights and bits.

    python tests/benchmarks/error.py [--methods M...] [--sqnr] [SET...]

Prints a table of relative root mean square errors, sqrt(sum (x - x_hat)^2 / sum x^2) over all
matrices of a set, or with --sqnr of 10 log10(sum x^2 / sum (x - x_hat)^2) in dB; in each cell the
peer's comes first, then qtool's by each method. Needs the extras test and interop, 8 GB and
some 40 minutes; a package that is missing is named, and its rows left out. Exits with 1
if a peer has less error than qtool anywhere.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import real_weights
from error_rows import ROWS, errors

METHODS = ("mse", "optimal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--sqnr", action="store_true")
    parser.add_argument("sets", nargs="*", choices=[[], *real_weights.SETS])
    chosen = parser.parse_args()
    sets = {name: real_weights.SETS[name]() for name in chosen.sets or real_weights.SETS}
    print("| peer | bits | qtool | bits |", " | ".join(sets), "|")
    print("|---|---|---|---|" + "---|" * len(sets))
    worse, missing = [], set()
    for row in ROWS:
        try:
            found = {name: errors(row, xs, chosen.methods) for name, xs in sets.items()}
        except ModuleNotFoundError as error:
            missing.add(str(error.name))
            continue
        worse += [f"{row.peer}, {name}" for name, f in found.items() if f and max(f) > f[0]]
        cells = [" ".join(_figure(e, decibels=chosen.sqnr) for e in f) for f in found.values()]
        own = [f"{row.bits:.4g}", row.words, f"{row.own_bits:.4g}"]
        print("|", " | ".join([row.peer + "\\*" * row.marked, *own, *cells]), "|", flush=True)
    print("\n\\* by a NumPy version of its method, which stands in tests/peers.py")
    if missing:
        print("missing, their rows left out:", ", ".join(sorted(missing)), file=sys.stderr)
    if worse:
        sys.exit("a peer has less error: " + "; ".join(worse))


def _figure(error: float, *, decibels: bool) -> str:
    return f"{-20 * math.log10(error):.2f}" if decibels else f"{error:.4f}".removeprefix("0")


if __name__ == "__main__":
    main()

"""Models that keep their weights in every place that ONNX has for them, with what feeds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx_jobs import bodies, normal, stored
from onnx_models import constant, initializer, model

Array = NDArray[Any]
make = helper.make_node
FLOAT = TensorProto.FLOAT


@dataclass(frozen=True)
class Construct:
    """A model of opset 21 or more and inputs for it.

    axes: by label of each weight, the axis of its output channels and the one that is summed over.
    fixed: weights that are inputs. restored: weights that come back under other names.
    """

    made: ModelProto
    feeds: list[dict[str, Array]]
    axes: dict[str, tuple[int, int]]
    fixed: Sequence[str] = ()
    restored: dict[str, str] = field(default_factory=dict)


def value(name: str, shape: Sequence[Any] | None, dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def w(name: str, *shape: int) -> TensorProto:
    return initializer(name, normal(*shape))


def graph(
    name: str,
    nodes: Sequence[NodeProto],
    outputs: Sequence[Any],
    *stored: TensorProto,
    inputs: Sequence[Any] = (),
) -> GraphProto:
    return helper.make_graph(list(nodes), name, list(inputs), list(outputs), list(stored))


CONDITION = [
    make("ReduceMax", ["x"], ["most"], keepdims=0),
    make("Greater", ["most", "limit"], ["c"]),
]
LIMIT = initializer("limit", 50)


def both_branches(shape: Sequence[int]) -> list[dict[str, Array]]:
    """Feeds for CONDITION, true and false."""
    x = normal(*shape)
    high = x.copy()
    high.flat[0] = 100
    return [{"x": high}, {"x": x}]


def same_name_in_both_branches() -> Construct:
    out = [value("z", [2, 8])]
    then = graph("t", [make("MatMul", ["x", "w"], ["z"])], out, w("w", 16, 8))
    other = graph("e", [make("Gemm", ["x", "w"], ["z"], transB=1)], out, w("w", 8, 16))
    nodes = [*CONDITION, make("If", ["c"], ["y"], "/a/If", then_branch=then, else_branch=other)]
    return Construct(
        model(nodes, [LIMIT], inputs={"x": (2, 16)}), both_branches((2, 16)),
        {"/a/If.else_branch/w": (0, 1), "/a/If.then_branch/w": (1, 0)},
    )  # fmt: skip


def constants_in_branches() -> Construct:
    out = [value("z", [2, 8])]
    then = graph(
        "t",
        [constant("k", normal(16, 8)), make("MatMul", ["x", "k"], ["z"])],
        out,
    )
    inner = [
        make("If", ["c"], ["d"],
             then_branch=graph("it", [make("Identity", ["x"], ["i"])], [value("i", [2, 16])]),
             else_branch=graph(
                 "ie", [constant("k", normal(16, 16)), make("MatMul", ["x", "k"], ["i"])],
                 [value("i", [2, 16])])),
        make("MatMul", ["d", "outer"], ["z"]),
    ]  # fmt: skip
    nodes = [
        *CONDITION,
        make("If", ["c"], ["y"], then_branch=then, else_branch=graph("e", inner, out)),
    ]
    return Construct(
        model(nodes, [LIMIT, w("outer", 16, 8)], inputs={"x": (2, 16)}), both_branches((2, 16)),
        {"outer": (1, 0), "If.else_branch/If.else_branch/k": (1, 0), "If.then_branch/k": (1, 0)},
    )  # fmt: skip


def branches_give_weights() -> Construct:
    shape = [value("v", [16, 8])]
    then = graph("t", [], shape, w("v", 16, 8))
    other = graph("e", [make("Identity", ["captured"], ["v"])], shape)
    nodes = [
        *CONDITION,
        make("If", ["c"], ["chosen"], "choose", then_branch=then, else_branch=other),
        make("MatMul", ["x", "chosen"], ["y"]),
    ]
    return Construct(
        model(nodes, [LIMIT, w("captured", 16, 8)], inputs={"x": (2, 16)}),
        both_branches((2, 16)),
        {"captured": (1, 0), "choose.then_branch/v": (1, 0)},
    )


def loop() -> Construct:
    nodes = [
        make("Identity", ["go"], ["on"]),
        make("MatMul", ["state", "outer"], ["h"]),
        make("Gemm", ["h", "inner"], ["next"], transB=1),
    ]
    body = graph(
        "body", nodes, [value("on", [], TensorProto.BOOL), value("next", [2, 8])],
        w("inner", 8, 16),
        inputs=[value("n", [], TensorProto.INT64), value("go", [], TensorProto.BOOL),
                value("state", [2, 8])],
    )  # fmt: skip
    made = model(
        [make("Loop", ["times", "", "x"], ["y"], body=body)],
        [initializer("times", 3, np.int64), w("outer", 8, 16)],
        inputs={"x": (2, 8)},
    )
    return Construct(made, [{"x": normal(2, 8)}], {"outer": (1, 0), "inner": (0, 1)})


def scan() -> Construct:
    nodes = [
        constant("recur", normal(8, 8)),
        make("MatMul", ["h", "recur"], ["a"]),
        make("MatMul", ["item", "feed"], ["b"]),
        make("Add", ["a", "b"], ["next"]),
        make("Identity", ["next"], ["item_out"]),
    ]
    body = graph(
        "body", nodes, [value("next", [2, 8]), value("item_out", [2, 8])],
        inputs=[value("h", [2, 8]), value("item", [2, 16])],
    )  # fmt: skip
    made = model(
        [make("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1)],
        [w("start", 2, 8), w("feed", 16, 8)],
        inputs={"x": (5, 2, 16)},
        outputs=("last", "y"),
    )
    axes = {"start": (0, 1), "feed": (1, 0), "recur": (1, 0)}  # of a state nothing is known
    return Construct(made, [{"x": normal(5, 2, 16)}], axes)


def inputs_and_outputs() -> Construct:
    made = model(
        [make("MatMul", ["x", "settable"], ["h"]), make("MatMul", ["h", "given"], ["y"])],
        [w("settable", 16, 16), w("given", 16, 8)],
        inputs={"x": (2, 16), "settable": (16, 16)},
        outputs=("y", "given"),
    )
    return Construct(
        made, [{"x": normal(2, 16)}], {"settable": (1, 0), "given": (1, 0)}, ["settable"]
    )


def shared() -> Construct:
    """Read along axis 1 by two nodes, one of them in a branch, and along axis 0 by one."""
    out = [value("z", [2, 16])]
    branches = {
        "then_branch": graph("t", [make("MatMul", ["x", "w"], ["z"])], out),
        "else_branch": graph("e", [make("Identity", ["x"], ["z"])], out),
    }
    nodes = [
        *CONDITION,
        make("Gemm", ["x", "w"], ["g"], transB=1),
        make("MatMul", ["g", "w"], ["m"]),
        make("If", ["c"], ["i"], **branches),
        make("Add", ["m", "i"], ["y"]),
    ]
    made = model(nodes, [LIMIT, w("w", 16, 16)], inputs={"x": (2, 16)})
    return Construct(made, both_branches((2, 16)), {"w": (1, 0)})


def function() -> Construct:
    """One that holds weights, also in a graph nested in it, and takes two."""
    out = [value("z", None)]
    nested = {
        "then_branch": graph("t", [make("MatMul", ["m", "deep"], ["z"])], out, w("deep", 8, 8)),
        "else_branch": graph("e", [make("Identity", ["m"], ["z"])], out),
    }
    nodes = [
        make("ReduceMax", ["a"], ["most"], keepdims=0),
        constant("limit", 50),
        make("Greater", ["most", "limit"], ["c"]),
        make("MatMul", ["a", "b"], ["n"]),
        constant("k", normal(8, 8)),
        make("Gemm", ["n", "k"], ["m"], transB=1),
        make("If", ["c"], ["r"], **nested),
    ]
    layer = helper.make_function(
        "local", "Layer", ["a", "b"], ["r"], nodes, [helper.make_opsetid("", 21)]
    )
    made = model(
        [make("Layer", ["x", "k"], ["h"], domain="local"),
         make("Layer", ["h", "v"], ["y"], domain="local")],
        [w("k", 16, 8), w("v", 8, 8)],
        inputs={"x": (2, 16)},
        imports=[helper.make_opsetid("local", 1)],
        functions=[layer],
    )  # fmt: skip
    return Construct(
        made, both_branches((2, 16)),
        {"k": (1, 0), "v": (1, 0), "local.Layer/k": (0, 1), "deep": (1, 0)},
    )  # fmt: skip


def laid_out_anew() -> Construct:
    """Behind Identity, Transpose, Cast, Reshape, Flatten, Squeeze and Unsqueeze."""
    nodes = [
        make("Identity", ["plain"], ["plain_i"]),
        make("MatMul", ["x", "plain_i"], ["a"]),
        make("Transpose", ["turned"], ["turned_t"], perm=[1, 0]),
        make("MatMul", ["a", "turned_t"], ["b"]),
        make("Cast", ["half"], ["half_c"], to=FLOAT),
        make("MatMul", ["b", "half_c"], ["d"]),
        make("Reshape", ["heads", "shape"], ["heads_r"]),
        make("Transpose", ["heads_r"], ["heads_t"]),
        make("MatMul", ["d", "heads_t"], ["e"]),
        make("Flatten", ["flat"], ["flat_f"], axis=1),
        make("Gemm", ["e", "flat_f"], ["f"], transB=1),
        make("Squeeze", ["one", "zero"], ["one_s"]),
        make("MatMul", ["f", "one_s"], ["g"]),
        make("Unsqueeze", ["two", "zero"], ["two_u"]),
        make("MatMul", ["g", "two_u"], ["h"]),
        make("Reshape", ["split", "split_shape"], ["split_r"]),
        make("MatMul", ["h", "split_r"], ["y"]),
    ]
    stored = [
        w("plain", 16, 16), w("turned", 8, 16),
        initializer("half", normal(8, 16), np.float16),
        w("heads", 4, 8, 16), initializer("shape", [-1, 16], np.int64),
        w("flat", 8, 2, 16), initializer("zero", [0], np.int64),
        w("one", 1, 8, 16), w("two", 16, 8),
        w("split", 16, 16), initializer("split_shape", [2, 8, -1], np.int64),
    ]  # fmt: skip
    made = model(nodes, stored, inputs={"x": (2, 16)})
    axes = {
        "plain": (1, 0), "turned": (0, 1), "half": (1, 0), "heads": (1, 2), "flat": (0, 2),
        "one": (2, 1), "two": (1, 0), "split": (1, 0),
    }  # fmt: skip
    return Construct(made, [{"x": normal(2, 16)}], axes, restored={"half": "half_c"})


def operators() -> Construct:
    """Convolutions, Gemm and Gather, one after another."""
    nodes = [
        make("Conv", ["x", "conv"], ["a"], pads=[1, 1, 1, 1]),
        make("ConvTranspose", ["a", "back"], ["b"], group=2, pads=[1, 1, 1, 1]),
        make("ReduceMean", ["b", "spatial"], ["e"], keepdims=0),
        make("Gemm", ["left", "e"], ["f"], transA=1, transB=1),
        make("MatMul", ["f", "right"], ["h"]),
        make("Gather", ["columns", "index"], ["g"], axis=1),
        make("Gemm", ["g", "h"], ["i"], transA=1),
        make("Gather", ["rows", "index"], ["j"]),
        make("Add", ["i", "j"], ["y"]),
    ]
    stored = [
        w("conv", 16, 8, 3, 3), w("back", 16, 8, 3, 3),
        initializer("spatial", [2, 3], np.int64), w("left", 16, 8), w("right", 2, 8),
        w("columns", 8, 16), initializer("index", [3, 1, 7], np.int64), w("rows", 16, 8),
    ]  # fmt: skip
    made = model(nodes, stored, inputs={"x": (2, 8, 5, 4)})
    return Construct(made, [{"x": normal(2, 8, 5, 4)}], {
        "conv": (0, 1), "back": (1, 0), "left": (1, 0), "right": (1, 0), "columns": (1, 0),
        "rows": (0, 1),
    })  # fmt: skip


def recurrent() -> Construct:
    """In both directions; biases and states have a shape of rank 2 and 3 too, and stay."""
    nodes, stored, axes = [], [], {}
    for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        inputs = [f"{name}_{part}" for part in "wrb"]
        more = [*inputs, "", f"{name}_h"]
        nodes.append(make(name, ["x", *more], [f"{name}_y"], hidden_size=8,
                          direction="bidirectional"))  # fmt: skip
        shapes = ((2, gates * 8, 16), (2, gates * 8, 8), (2, 2 * gates * 8), (2, 3, 8))
        stored += [w(n, *shape) for n, shape in zip((*inputs, more[-1]), shapes, strict=True)]
        axes |= dict.fromkeys(inputs[:2], (1, 2))
    made = model(
        nodes, stored, inputs={"x": (5, 3, 16)}, outputs=[node.output[0] for node in nodes]
    )
    return Construct(made, [{"x": normal(5, 3, 16)}], axes)


# the equation, the shapes of x and of the weight, the weight's axes, whether it comes first
EQUATIONS: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int], bool]] = [
    ("ij,jk->ik", (2, 16), (16, 8), (1, 0), False),
    ("kj, ij", (2, 16), (8, 16), (0, 1), True),
    ("abc,cde->abde", (2, 3, 16), (16, 2, 8), (2, 0), False),
    ("bqhd,hdo->bqo", (2, 3, 4, 8), (4, 8, 16), (2, 1), False),
    ("...i,io->...o", (2, 3, 16), (16, 8), (1, 0), False),
    ("hoi,bhi->bho", (2, 4, 16), (4, 8, 16), (1, 2), True),
]


def einsum() -> Construct:
    nodes, stored, axes, feeds = [], [], {}, {}
    for number, (equation, x, shape, own, is_first) in enumerate(EQUATIONS):
        names = [f"x{number}", f"w{number}"]
        feeds[names[0]] = normal(*x)
        stored.append(w(names[1], *shape))
        axes[names[1]] = own
        order = names[::-1] if is_first else names
        nodes.append(make("Einsum", order, [f"y{number}"], equation=equation))
    made = model(
        nodes, stored, inputs={name: v.shape for name, v in feeds.items()},
        outputs=[node.output[0] for node in nodes],
    )  # fmt: skip
    return Construct(made, [feeds], axes)


def in_type(construct: Construct, dtype: str) -> Construct:
    """The same in another float type, its float32 tensors rounded."""
    made, element = ModelProto(), np.dtype(dtype)
    made.CopyFrom(construct.made)
    code = helper.np_dtype_to_tensor_dtype(element)
    for body in bodies(made):
        for name, tensor in stored(body).items():
            if tensor.data_type == FLOAT:
                rounded = numpy_helper.to_array(tensor).astype(element)
                tensor.CopyFrom(numpy_helper.from_array(rounded, name))
        values = (*body.input, *body.output) if isinstance(body, GraphProto) else ()
        for declared in values:
            if declared.type.tensor_type.elem_type == FLOAT:
                declared.type.tensor_type.elem_type = code
        for attribute in (a for node in body.node for a in node.attribute if a.name == "to"):
            attribute.i = code if attribute.i == FLOAT else attribute.i
    feeds = [{name: x.astype(element) for name, x in given.items()} for given in construct.feeds]
    return replace(construct, made=made, feeds=feeds)


CONSTRUCTS: list[Callable[[], Construct]] = [
    same_name_in_both_branches, constants_in_branches, branches_give_weights, loop, scan,
    inputs_and_outputs, shared, function, laid_out_anew, operators, recurrent, einsum,
]  # fmt: skip

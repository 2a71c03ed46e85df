"""Train a small network on scikit-learn's digits and write every data file of the examples.

    python train_digits.py [FOLDER]        default: the folder of this script

The network is 64 -> 128 -> 64 -> 10 with ReLU, trained by plain stochastic gradient descent on a
squared hinge loss: nothing in it needs exp or log, whose last bit differs between machines. Each
operand of a matrix product lies on a grid of fixed-point numbers coarse enough for the sum to be
exact in float64, so the order in which a BLAS adds cannot show: all machines write the same bytes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Array = NDArray[np.float64]

PRODUCER = "train_digits.py"
SEED = 0
SIZES = (64, 128, 64, 10)
TEST_IMAGES = 360
ACTIVATION_ROWS = 64
EPOCHS = 150
BATCH = 64
RATE = 0.01
MOMENTUM = 0.9

# Fraction bits. A product sums at most 128 terms of 20 bits (weights, |w| < 16) times 18 bits
# (activations, |a| < 64) or 23 bits (gradients, |g| < 8): 50 bits at most, and float64 holds 53.
WEIGHT_BITS, ACTIVATION_BITS, GRADIENT_BITS = 16, 12, 20


def fixed(x: Array, bits: int) -> Array:
    """x rounded to multiples of 2**-bits."""
    return np.rint(x * 2.0**bits) / 2.0**bits


def digits() -> tuple[Array, NDArray[Any], Array, NDArray[Any]]:
    """Training images (N, 64) in [0, 1] and labels (N,), then the same for testing."""
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        images / 16.0, labels, test_size=TEST_IMAGES, random_state=SEED, stratify=labels
    )
    return x, y, x_test, y_test


def initial_params(rng: np.random.RandomState) -> list[Array]:
    """Weight (out, in) and bias (out,) of each layer, weights uniform with variance 2 / in."""
    params = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        bound = np.sqrt(6.0 / fan_in)
        params.append((2.0 * rng.random_sample((fan_out, fan_in)) - 1.0) * bound)
        params.append(np.zeros(fan_out))
    return params


def shifted(x: Array, rng: np.random.RandomState) -> Array:
    """Each image moved by up to one pixel each way, what comes in from the edges empty."""
    padded = np.pad(x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    dy, dx = rng.randint(0, 3, size=(2, len(x), 1, 1))
    rows, columns = dy + np.arange(8)[:, None], dx + np.arange(8)
    moved: Array = padded[np.arange(len(x))[:, None, None], rows, columns].reshape(-1, 64)
    return moved


def forward(params: list[Array], x: Array) -> tuple[list[Array], list[Array]]:
    """What goes into each layer and what comes out of it before ReLU; the last are the logits."""
    inputs, outputs = [x], []
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        outputs.append(fixed(inputs[-1] @ weight.T + bias, ACTIVATION_BITS))
        inputs.append(np.maximum(outputs[-1], 0.0))
    return inputs[:-1], outputs


def gradients(params: list[Array], x: Array, y: NDArray[Any]) -> list[Array]:
    """d loss / d params, loss = mean over the batch of sum(max(0, 1 - t * logit)**2), t = +-1."""
    params = [fixed(p, WEIGHT_BITS) for p in params]
    inputs, outputs = forward(params, x)
    target = np.where(y[:, None] == np.arange(SIZES[-1]), 1.0, -1.0)
    back = -2.0 * target * np.maximum(0.0, 1.0 - target * outputs[-1]) / len(x)
    grads: list[Array] = []
    for i in reversed(range(len(inputs))):
        back = fixed(back, GRADIENT_BITS)
        grads = [back.T @ inputs[i], back.sum(axis=0), *grads]
        back = (back @ params[2 * i]) * (inputs[i] > 0.0)
    return grads


def train(x: Array, y: NDArray[Any]) -> list[Array]:
    """The trained parameters, on the grid of the weights and therefore exact in float32."""
    rng = np.random.RandomState(SEED)  # the NumPy generator whose numbers are frozen for good
    params = initial_params(rng)
    speed = [np.zeros_like(p) for p in params]
    for epoch in range(EPOCHS):
        rate = RATE * (1.0 - epoch / EPOCHS)
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            grads = gradients(params, shifted(x[rows], rng), y[rows])
            speed = [MOMENTUM * v - rate * g for v, g in zip(speed, grads, strict=True)]
            params = [p + v for p, v in zip(params, speed, strict=True)]
    return [fixed(p, WEIGHT_BITS) for p in params]


def onnx_model(tensors: dict[str, NDArray[np.float32]]) -> onnx.ModelProto:
    """The network as Gemm and Relu nodes, from `image` (N, 64) to `logits` (N, 10)."""
    layers = len(tensors) // 2
    nodes, name = [], "image"
    for i in range(1, layers + 1):
        out = "logits" if i == layers else f"fc{i}.out"
        inputs = [name, f"fc{i}.weight", f"fc{i}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [out], f"fc{i}", transB=1))
        name = f"fc{i}.relu"
        if i < layers:
            nodes.append(helper.make_node("Relu", [out], [name], name))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", SIZES[0]])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", SIZES[-1]])],
        [numpy_helper.from_array(tensor, name) for name, tensor in tensors.items()],
    )
    # Opset 17 is older than int4 and float8: quantizing to them has to raise it.
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=PRODUCER
    )
    helper.set_model_props(model, {"task": "digit classification", "pixels": "0 to 1"})
    onnx.checker.check_model(model, full_check=True)
    return model


def main(folder: Path) -> None:
    x, y, x_test, y_test = digits()
    params = train(x, y)
    _, outputs = forward(params, x_test)
    names = [f"fc{i}.{kind}" for i in range(1, len(SIZES)) for kind in ("weight", "bias")]
    tensors = {name: p.astype(np.float32) for name, p in zip(names, params, strict=True)}

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    (folder / "digits.onnx").write_bytes(onnx_model(tensors).SerializeToString(deterministic=True))
    np.save(folder / "digits_inputs.npy", x_test.astype(np.float32))
    np.save(folder / "digits_labels.npy", y_test.astype(np.uint8))
    np.save(folder / "activations.npy", outputs[1][:ACTIVATION_ROWS].astype(np.float32))

    correct = np.count_nonzero(outputs[-1].argmax(axis=1) == y_test)
    print(f"{correct} of {len(y_test)} test images right")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

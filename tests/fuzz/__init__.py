"""Every parser fed with what no honest writer writes; a module for each, and the same oracle.

A target has seeds(), good inputs; mutate(data, rng), a bad one made of any; and
run(data, folder), which reads it and may raise QtoolError, and nothing else.

Coverage-guided, in an environment with the extra `test` and atheris (Python 3.11 to 3.13):
PYTHONPATH=tests python -m fuzz npz --seconds 60
"""

TARGETS = (
    "npy", "npz", "safetensors", "metadata", "foreign", "checkpoint", "onnx", "rewrite", "external",
    "recipe", "rule", "report", "page", "against", "gate", "config", "given",
    "inputs",
)  # fmt: skip

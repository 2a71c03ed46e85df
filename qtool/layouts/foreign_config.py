"""What a model's configuration files say of how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The files beside a model's tensors that say something.
FILES = ("config.json", "hf_quant_config.json")
# Names of the same method.
_METHODS = {"auto-round": "gptq", "gptq_marlin": "gptq", "awq_marlin": "awq"}

Documents = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The facts that names and types of tensors do not tell; None, or empty, for those not said.

    method: "compressed-tensors", "modelopt", "gptq", "awq", "mlx", "comfyui", ...
    bits, group_size: of most weights. checkpoint_format: GPTQ's. modules: MLX's bits and group
    sizes of modules that differ, by name.
    """

    method: str | None = None
    bits: int | None = None
    group_size: int | None = None
    checkpoint_format: str | None = None
    modules: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int | None, int | None]:
        """Bits and group size of the weight of a module."""
        return self.modules.get(module, (self.bits, self.group_size))


def config_of(documents: Documents, metadata: Mapping[str, str]) -> Config:
    """The Config that documents, by file name, and a .safetensors file's metadata make.

    What is not as the tools write it counts as not said.
    """
    main = _object(documents.get("config.json"))
    said = _object(main.get("quantization_config")) or _object(main.get("quantization"))
    method = said.get("quant_method")
    if "quantization" in main and method is None:
        method = "mlx"
    if not said and "hf_quant_config.json" in documents:
        said = _object(_object(documents["hf_quant_config.json"]).get("quantization"))
        method = "modelopt"
    if not said and "_quantization_metadata" in metadata:
        method = "comfyui"
    groups = [
        _object(_object(g).get("weights")) for g in _object(said.get("config_groups")).values()
    ]
    facts = groups[0] if len(groups) == 1 else said
    return Config(
        _METHODS.get(method, method) if isinstance(method, str) else None,
        _number(facts, "bits", "num_bits", "w_bit"),
        _number(facts, "group_size", "q_group_size"),
        text if isinstance(text := said.get("checkpoint_format"), str) else None,
        {
            name: (_number(entry, "bits"), _number(entry, "group_size"))
            for name, entry in said.items()
            if method == "mlx" and isinstance(entry, dict)
        },
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    """The first of those entries that is a positive number."""
    found = (values.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)

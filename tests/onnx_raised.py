"""Raising the opset of a model in a test."""

from __future__ import annotations

import onnx
from onnx import ModelProto

from qtool.formats.onnx.graph import Names
from qtool.formats.onnx.opset import raise_opset


def raised(made: ModelProto, opset: int) -> ModelProto:
    """A copy at that opset, checked in full."""
    copy = ModelProto()
    copy.CopyFrom(made)
    raise_opset(copy, opset, Names.of(copy), "model.onnx")
    onnx.checker.check_model(copy, full_check=True)
    return copy

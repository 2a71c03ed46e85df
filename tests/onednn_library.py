"""The operation Quantize of the real oneDNN library, through its graph API and ctypes.

Source: oneDNN 3.2, dnnl_graph.h and dnnl_graph_types.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CPU = 1  # dnnl_engine_kind_t
IN_ORDER = 1  # dnnl_stream_flags_t
F32, S8, U8 = 3, 5, 6  # dnnl_data_type_t
STRIDED = 2  # dnnl_graph_layout_type_t
VARIABLE = 1  # dnnl_graph_tensor_property_t
FUSION = 1  # dnnl_graph_partition_policy_t
QUANTIZE = 49  # dnnl_graph_op_kind_t
SCALES, ZPS, QTYPE = 0x20, 0x4D, 0x85  # dnnl_graph_op_attr_t


class LogicalTensor(ctypes.Structure):
    """dnnl_graph_logical_tensor_t."""

    _fields_ = (
        ("id", ctypes.c_size_t),
        ("ndims", ctypes.c_int),
        ("dims", ctypes.c_int64 * 12),
        ("data_type", ctypes.c_int),
        ("property", ctypes.c_int),
        ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * 12),
    )


class Library:
    """libdnnl.so.3, loaded."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._engine = self._new("dnnl_engine_create", CPU, ctypes.c_size_t(0))
        self._stream = self._new("dnnl_stream_create", self._engine, IN_ORDER)

    def quantize(
        self, src: NDArray[np.float32], scale: float, zp: int, dst: type[np.generic]
    ) -> NDArray[Any]:
        """Quantize a float32 vector per tensor to np.int8 or np.uint8.

        This version of the library refuses an operation without zps.
        """
        out = np.zeros(src.shape, dst)
        logical = [
            self._logical(0, src.shape[0], F32),
            self._logical(1, src.shape[0], S8 if dst is np.int8 else U8),
        ]
        with self._partition(logical, scale, zp) as partition:
            self._run(partition, logical, [src, out])
        return out

    @contextmanager
    def _partition(
        self, logical: list[LogicalTensor], scale: float, zp: int
    ) -> Iterator[ctypes.c_void_p]:
        """The one partition of a graph of a single Quantize."""
        op = self._new("dnnl_graph_op_create", ctypes.c_size_t(0), QUANTIZE, b"quantize")
        self._call("dnnl_graph_op_add_input", op, ctypes.byref(logical[0]))
        self._call("dnnl_graph_op_add_output", op, ctypes.byref(logical[1]))
        one = ctypes.c_size_t(1)
        self._call("dnnl_graph_op_set_attr_str", op, QTYPE, b"per_tensor", ctypes.c_size_t(10))
        scales = (ctypes.c_float * 1)(scale)
        self._call("dnnl_graph_op_set_attr_f32", op, SCALES, scales, one)
        self._call("dnnl_graph_op_set_attr_s64", op, ZPS, (ctypes.c_int64 * 1)(zp), one)
        graph = self._new("dnnl_graph_graph_create", CPU)
        self._call("dnnl_graph_add_op", graph, op)
        self._call("dnnl_graph_graph_finalize", graph)
        self._call("dnnl_graph_graph_filter", graph, FUSION)
        partition = ctypes.c_void_p()
        self._call("dnnl_graph_graph_get_partitions", graph, one, ctypes.byref(partition))
        yield partition
        self._call("dnnl_graph_partition_destroy", partition)
        self._call("dnnl_graph_graph_destroy", graph)
        self._call("dnnl_graph_op_destroy", op)

    def _run(
        self, partition: ctypes.c_void_p, logical: list[LogicalTensor], arrays: list[NDArray[Any]]
    ) -> None:
        compiled = self._new("dnnl_graph_compiled_partition_create", partition)
        one = ctypes.c_size_t(1)
        pointers = [(ctypes.POINTER(LogicalTensor) * 1)(ctypes.pointer(t)) for t in logical]
        self._call(
            "dnnl_graph_partition_compile",
            partition,
            compiled,
            one,
            pointers[0],
            one,
            pointers[1],
            self._engine,
        )
        tensors = [
            self._new(
                "dnnl_graph_tensor_create",
                ctypes.byref(t),
                self._engine,
                ctypes.c_void_p(array.ctypes.data),
            )
            for t, array in zip(logical, arrays, strict=True)
        ]
        handles = [(ctypes.c_void_p * 1)(t) for t in tensors]
        self._call(
            "dnnl_graph_compiled_partition_execute",
            compiled,
            self._stream,
            one,
            handles[0],
            one,
            handles[1],
        )
        self._call("dnnl_stream_wait", self._stream)
        for tensor in tensors:
            self._call("dnnl_graph_tensor_destroy", tensor)
        self._call("dnnl_graph_compiled_partition_destroy", compiled)

    def _logical(self, identifier: int, size: int, data_type: int) -> LogicalTensor:
        tensor = LogicalTensor()
        dims = (ctypes.c_int64 * 12)(size)
        self._call(
            "dnnl_graph_logical_tensor_init_with_dims",
            ctypes.byref(tensor),
            ctypes.c_size_t(identifier),
            data_type,
            1,
            dims,
            STRIDED,
            VARIABLE,
        )
        return tensor

    def _new(self, function: str, *args: Any) -> ctypes.c_void_p:
        """The handle that a create function fills in."""
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), *args)
        return handle

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._lib, function)(*args)
        if status:
            raise RuntimeError(f"{function} gives dnnl_status_t {status}")

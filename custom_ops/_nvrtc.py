"""CUDA C++ compiled when it is first used, by the NVRTC that PyTorch brings, and launched at little cost to the host.

A kernel takes one struct by value. A launch packs it and calls the driver: no tensor is converted, nothing is
allocated, and the call is one that a stream capture records.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import re
import site
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from custom_ops._driver import CudaError, again, check, driver

logger = logging.getLogger(__name__)

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number; one CUlaunchAttribute.
_CONFIG = struct.Struct("@7I4xPPI4x")
_ATTRIBUTE = struct.Struct("@I4x3I52x")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of the CUDA version that PyTorch was built with: on the loader's path, or among the packages."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [*site.getsitepackages(), os.path.dirname(os.path.dirname(torch.__file__))]
    packaged = [path for folder in folders for path in sorted(glob.glob(f"{folder}/nvidia/*/lib/{name}"))]
    for path in (name, *packaged):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(f"{name} is not found")


def sources(name: str) -> tuple[str, dict[str, str]]:
    """The text of a file of this package, and by name that of the headers that it and they include."""
    folder, headers = Path(__file__).parent, {}
    source = (folder / name).read_text()
    wanted = _INCLUDE.findall(source)
    while wanted:
        header = wanted.pop()
        if header not in headers:
            headers[header] = (folder / header).read_text()
            wanted += _INCLUDE.findall(headers[header])
    return source, headers


def compile_cuda(
    source: str,
    name: str,
    capability: tuple[int, int],
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The cubin of ``source`` for one GPU architecture; headers: text by the name it is included with.

    Raises CudaError with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    architecture = f"--gpu-architecture=sm_{capability[0]}{capability[1]}"
    arguments = [architecture, "--std=c++17", "--device-as-default-execution-space", *options]

    def check(code: int) -> None:
        if code:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(1, size.value))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"NVRTC error {code} for {name}: {log.value.decode(errors='replace').strip()}")

    def strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
        encoded = [text.encode() for text in texts]
        return (ctypes.c_char_p * len(encoded))(*encoded)

    texts, names = strings((headers or {}).values()), strings(headers or {})
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(names), texts, names))
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(arguments), strings(arguments)))
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def build(name: str, capability: tuple[int, int], options: Sequence[str]) -> bytes:
    """The cubin of a file of this package for one GPU architecture. Raises CudaError."""
    source, headers = sources(name)
    return compile_cuda(source, name, capability, options, headers)


class _Record(threading.local):
    """The memory that a thread's launches are described in, reused from call to call."""

    def __init__(self, size: int) -> None:
        self.parameters = ctypes.create_string_buffer(size)
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.attribute = ctypes.create_string_buffer(_ATTRIBUTE.size)
        self.attribute_address = ctypes.addressof(self.attribute)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.parameters))
        self.addresses = (ctypes.addressof(self.config), ctypes.addressof(self.pointer))


class CudaKernel:
    """A kernel of a cubin on one device.

    threads: of a block. shared: bytes of dynamic shared memory of a block. layout: a ``struct`` format of the one
    argument, fields in order.
    """

    def __init__(self, cubin: bytes, name: str, device: int, threads: int, shared: int, layout: str) -> None:
        cuda = driver()
        library, self._kernel, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        check(cuda.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0))
        check(cuda.cuLibraryGetKernel(ctypes.byref(self._kernel), library, name.encode()))
        check(cuda.cuDeviceGet(ctypes.byref(handle), device))
        check(cuda.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, shared, self._kernel, handle))
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()  # there is a context; the kernel is loaded into it now
            function = ctypes.c_void_p()
            check(cuda.cuKernelGetFunction(ctypes.byref(function), self._kernel))
        self._layout = struct.Struct("@" + layout)
        self._record = _Record(self._layout.size)
        self._address = self._kernel.value
        self._device, self._threads, self._shared = device, threads, shared
        self._call = cuda.cuLaunchKernelEx

    def launch(self, blocks: int, arguments: Sequence[Any], cluster: int = 1) -> None:
        """Launch on the device's current stream; ``cluster`` divides ``blocks``. Raises CudaError."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(blocks, arguments, cluster)
        record = self._record
        self._layout.pack_into(record.parameters, 0, *arguments)
        if cluster > 1:
            _ATTRIBUTE.pack_into(record.attribute, 0, _CLUSTER_DIMENSION, cluster, 1, 1)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        _CONFIG.pack_into(
            record.config, 0, blocks, 1, 1, self._threads, 1, 1, self._shared, stream,
            record.attribute_address, cluster > 1,
        )  # fmt: skip
        config, parameters = record.addresses
        if code := self._call(config, self._address, parameters, None):
            again(code, self._device, lambda: self._call(config, self._address, parameters, None))


def obstacle(what: str, device: int, build: Callable[[int], object]) -> str | None:
    """Why the kernels of ``what`` cannot run on a device, or None; what ``build`` fails with is logged."""
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0, the GPU has {major}.{minor}"
    try:
        build(device)
    except (CudaError, OSError, RuntimeError, AttributeError) as error:
        logger.warning("%s: the CUDA kernels cannot be built, Triton serves instead: %s", what, error)
        return f"the kernels cannot be built: {error}"
    return None


def missing_here(missing_on: Callable[[int], str | None]) -> str | None:
    """What ``missing_on`` says of the current device."""
    return missing_on(torch.cuda.current_device()) if torch.cuda.is_available() else "there is no CUDA device"


@functools.cache
def multiprocessors(device: int) -> int:
    """How many a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count

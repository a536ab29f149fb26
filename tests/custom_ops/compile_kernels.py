"""Compile every kernel of ``custom_ops`` for sm_90 and sm_100; no GPU is needed. Run as a script.

Prints a table: registers a thread, bytes of shared memory a block, bytes a thread spills, on each target; on the
last line the same as JSON, with ``unlisted``: jitted functions that are neither in a family's ``KERNELS`` nor
called by one that is. An entry of ``KERNELS`` is (kernel, types of its arguments, constants); launch options such
as ``num_warps`` are among the constants.
``--first``: only the first entry of each kernel, without its constants.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import custom_ops

CAPABILITIES = (90, 100)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def families() -> list[ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(custom_ops.__path__) if m.name != "__main__"]
    modules = [importlib.import_module(f"custom_ops.{name}") for name in names]
    return [*modules, importlib.import_module("sparse_pcg.kv.page_copy")]


def unlisted(modules: list[ModuleType]) -> list[str]:
    """Jitted functions of the package that compiling the listed kernels does not reach."""
    found = {
        value.fn.__qualname__ + " of " + value.fn.__module__: value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.fn.__module__.startswith("custom_ops")
    }
    reached: list[JITFunction] = [kernel for m in modules for kernel, _, _ in getattr(m, "KERNELS", ())]
    for function in reached:
        called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
        reached += [c for c in called if isinstance(c, JITFunction) and c not in reached]
    return sorted(name for name, value in found.items() if value not in reached)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of memory a thread that spilled registers take."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    return {"registers": int(used["REG"]), "spilled": int(used["STACK"]) + int(used["LOCAL"])}


def compiled(
    kernel: JITFunction, signature: dict[str, str], constants: dict[str, Any], capability: int
) -> dict[str, Any]:
    begin = time.perf_counter()
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    binary = triton.compile(
        ASTSource(kernel, types, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "enable_fp_fusion": False, **options},
    )
    return {
        "kernel": f"{kernel.fn.__module__.removeprefix('custom_ops.')}.{kernel.fn.__name__}",
        "target": f"sm_{capability}",
        **resources(binary.asm["cubin"]),
        "shared": binary.metadata.shared,
        "constants": {name: str(value) for name, value in {**constants, **options}.items()},
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    modules = families()
    entries = [entry for module in modules for entry in getattr(module, "KERNELS", ())]
    if "--first" in sys.argv:
        entries = [e for i, e in enumerate(entries) if e[0] not in [other[0] for other in entries[:i]]]
    built = []
    cell = "{registers:>7} {shared:>7} {spilled:>7}"
    heads = "".join(f"  {title:>23}" for title in (f"sm_{c}: regs shared spill" for c in CAPABILITIES))
    print(f"{'kernel':50}{heads}")
    for entry in entries:
        both = [compiled(*entry, capability) for capability in CAPABILITIES]
        built += both
        constants = [] if "--first" in sys.argv else [both[0]["constants"]]
        print(f"{both[0]['kernel']:50}", *(cell.format(**b) for b in both), *constants, flush=True)
    print(json.dumps({"kernels": built, "unlisted": unlisted(modules)}))


if __name__ == "__main__":
    main()

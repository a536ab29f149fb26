"""Processes that share a model: what torchrun started, as a mesh."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from .backend import reset
from .collectives import leave_all
from .liveness import leave_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def launched(device_type: str) -> Iterator[DeviceMesh | None]:
    """The processes that torchrun started, as a mesh of one dim, "tp"; None for a process on its own.

    On CUDA each process takes the GPU of its local rank and collectives are NCCL's, without NVLink multicast unless
    ``NCCL_NVLS_ENABLE`` says otherwise; on the CPU they are gloo's. At the end captured graphs are dropped, then the
    process group: NCCL ends a communicator only once no graph holds its collectives. After an error on CUDA the process
    ends at once, with its traceback and status 1, and the others are told; an exit, or an error of the command line,
    has its own status and message, and with status 0 the end is in order.
    Raises ValueError where this machine has fewer GPUs than processes.
    """
    if processes() == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    cuda = device_type == "cuda"
    if cuda:
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"launch: each process must have a GPU of its own, got local rank {local}, {gpus} GPUs")
        torch.cuda.set_device(local)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    mesh = init_device_mesh(device_type, (processes(),), mesh_dim_names=("tp",))
    if cuda:  # the first collective makes the communicator, which no capture could hold
        dist.all_reduce(torch.zeros(1, device="cuda"), group=mesh.get_group())
        torch.cuda.synchronize()
    try:
        yield mesh
    except BaseException as error:
        status = _status(error)
        if status == 0:
            _close()
        elif cuda:
            # The others may be gone, and captured graphs still hold collectives: an end in order would wait for both.
            _end(error, status)
        raise
    _close()


def _close() -> None:
    reset()
    gc.collect()
    torch.distributed.destroy_process_group()


def _status(error: BaseException) -> int:
    """What the process would exit with: typer's exits and errors name it as ``exit_code``."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def _end(error: BaseException, status: int) -> NoReturn:
    show = getattr(error, "show", None)  # typer's errors have a message of their own
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif callable(show):
        show()
    elif not hasattr(error, "exit_code"):
        traceback.print_exception(error)
    leave_all(error)
    leave_process(status)

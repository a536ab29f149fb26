"""How a process that torchrun started ends, with the GPU and the other ranks stood in for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import typer

from sparse_pcg import launch


class Ended(BaseException):
    """In place of the end of the process; its argument is the status."""


@pytest.fixture(name="done")
def processes_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to end, in order."""
    done: list[str] = []

    def leave(status: int) -> None:
        raise Ended(status)

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for module, name in (
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (torch.distributed, "init_process_group"),
        (torch.distributed, "all_reduce"),
    ):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(torch, "zeros", nothing)
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", lambda *a, **k: _Mesh())
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(launch, "leave_all", lambda error: done.append("others told"))
    monkeypatch.setattr(launch, "leave_process", leave)
    return done


class _Mesh:
    def get_group(self) -> None:
        return None


def _raises(error: BaseException) -> None:
    with launch.launched("cuda"):
        raise error


def test_an_end_without_an_error_is_in_order(done: list[str]) -> None:
    with launch.launched("cuda"):
        pass
    assert done == ["destroyed"]


@pytest.mark.parametrize("make", [lambda: SystemExit(0), SystemExit, typer.Exit])
def test_an_exit_without_an_error_ends_in_order(done: list[str], make: Callable[[], BaseException]) -> None:
    error = make()
    with pytest.raises(type(error)) as raised:
        _raises(error)
    assert raised.value is error and done == ["destroyed"]


@pytest.mark.parametrize(
    "error, status, says",
    [
        (SystemExit(3), 3, ""),
        (SystemExit("no such file"), 1, "no such file"),
        (typer.Exit(4), 4, ""),
        (typer.BadParameter("rows: must be positive"), 2, "rows: must be positive"),
        (ValueError("too long"), 1, "Traceback"),
        (KeyboardInterrupt(), 1, "Traceback"),
    ],
)
def test_an_error_has_its_own_status_and_message(
    done: list[str], capsys: pytest.CaptureFixture[str], error: BaseException, status: int, says: str
) -> None:
    with pytest.raises(Ended) as ended:
        _raises(error)
    assert ended.value.args == (status,) and done == ["others told"]
    printed = capsys.readouterr().err
    assert says in printed
    assert ("Traceback" in printed) == (says == "Traceback") and bool(printed) == bool(says)

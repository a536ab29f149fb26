"""``torch.library.opcheck`` for ops with e4m3 inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from custom_ops._register import OPS
from tests.custom_ops import strategies as s


def opcheck(name: str, args: Mapping[str, Any], written: Collection[str] = ()) -> None:
    """Everything opcheck does; that only ``written`` arguments change and none is returned, on bytes.

    PyTorch's own test of that compares the inputs with ``allclose``, which float8 does not have.
    """
    overload = OPS[name].overload
    declared = {
        a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    assert declared == set(written), f"{name} declares that it writes {sorted(declared)}"
    tensors = {key: value for key, value in args.items() if isinstance(value, torch.Tensor)}
    before = {key: s.as_bytes(value).clone() for key, value in tensors.items()}
    results = overload(*args.values())
    changed = {key for key, value in tensors.items() if not torch.equal(s.as_bytes(value), before[key])}
    assert changed <= declared, f"{name} wrote {sorted(changed - declared)}"
    storages = {value.untyped_storage().data_ptr() for value in tensors.values() if value.numel()}
    for result in results if isinstance(results, tuple) else (results,):
        if result is not None and result.numel():
            assert result.untyped_storage().data_ptr() not in storages, f"{name} returns an argument"
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(overload, tuple(args.values()), test_utils=rest)

"""What the operator tests share: sizes to try, strided and poisoned inputs, exact comparisons, a bench."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch

from custom_ops._register import OPS, use_provider

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"

BUCKET = 16
TOKENS = (0, 1, 2, 7, BUCKET - 1, BUCKET, BUCKET + 1)  # nothing, one, two, a prime, around a bucket

tokens = st.sampled_from(TOKENS)
seeds = st.integers(0, 2**31 - 1)
floats = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))
layouts = st.sampled_from(("contiguous", "sliced", "transposed", "expanded"))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layout: str = "contiguous",
    std: float = 1.0,
) -> torch.Tensor:
    """Normal values on the test device, in memory as ``layout`` says; what lies between the elements is NaN.

    sliced: columns cut out of wider rows, as from a fused projection. transposed: the last two dims
    swapped in memory. expanded: one row repeated with stride 0.
    """
    shape = tuple(shape)
    x = (torch.randn(shape, generator=generator(seed)) * std).to(dtype).to(DEVICE)
    if layout == "sliced":
        wide = torch.full((*shape[:-1], shape[-1] + 24), torch.nan, dtype=dtype, device=DEVICE)
        wide[..., 8 : 8 + shape[-1]] = x
        return wide[..., 8 : 8 + shape[-1]]
    if layout == "transposed" and len(shape) > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and shape[0] > 1:
        return x[:1].expand(shape)
    return x


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_meta(got: torch.Tensor, want: torch.Tensor) -> None:
    """Shape, dtype and stride; a dimension of size 1 may have any stride, as may all in an empty tensor."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    if got.numel():
        pairs = zip(got.shape, got.stride(), want.stride(), strict=True)
        assert all(n == 1 or a == b for n, a, b in pairs), (got.stride(), want.stride())


def assert_bitwise(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same shape, dtype, stride and bytes."""
    assert_same_meta(got, want)
    assert torch.equal(as_bytes(got), as_bytes(want)), mismatch(got, want)


def mismatch(got: torch.Tensor, want: torch.Tensor) -> str:
    a, b = got.detach().float().cpu(), want.detach().float().cpu()
    where = ((a != b) & ~(a.isnan() & b.isnan())).nonzero()
    shown = [(tuple(i.tolist()), a[tuple(i)].item(), b[tuple(i)].item()) for i in where[:6]]
    return f"{len(where)} of {a.numel()} differ; (index, got, want): {shown}"


def assert_e4m3(got: torch.Tensor, want: torch.Tensor, codes: int = 0) -> None:
    """Two e4m3 tensors, or their bytes, agree within ``codes`` steps of the format; NaN of either sign is
    one value.

    0 for values computed the same way; 1 where the inputs differ in the last bits (a reduction in another
    order).
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    a, b = (t.detach().contiguous().view(torch.uint8).cpu().to(torch.int32) for t in (got, want))
    ordered_a, ordered_b = (torch.where(t >= 128, 128 - t, t) for t in (a, b))
    fine = ((ordered_a - ordered_b).abs() <= codes) & ((a & 127) != 127) & ((b & 127) != 127)
    fine |= ((a & 127) == 127) & ((b & 127) == 127)
    bad = (~fine).nonzero()
    assert len(bad) == 0, [(tuple(i.tolist()), a[tuple(i)].item(), b[tuple(i)].item()) for i in bad[:6]]


def fake_of(name: str, *args: Any) -> Any:
    """What the op's fake implementation says for these arguments (as fake tensors)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        return OPS[name].overload(*faked)


def assert_fake_is_exact(name: str, args: Sequence[Any], real: Any) -> None:
    """The fake result has the real one's shape, dtype and stride."""
    fake = fake_of(name, *args)
    fakes, reals = (r if isinstance(r, tuple) else (r,) for r in (fake, real))
    for f, r in zip(fakes, reals, strict=True):
        assert (f.shape, f.dtype, f.device) == (r.shape, r.dtype, r.device), (f, r)
        assert f.stride() == r.stride(), (f.stride(), r.stride())


def far_apart(rows: torch.Tensor, folder: Path) -> torch.Tensor:
    """bfloat16 [T, 3, D], 2 ** 31 elements between the first head and the last; on a CPU in a file with holes."""
    elements, (_, _, width) = 2**32 + rows.numel(), rows.shape
    if rows.is_cuda:
        memory = torch.empty(elements, dtype=torch.bfloat16, device=rows.device)
    else:
        memory = torch.from_file(str(folder / "far"), shared=True, size=elements, dtype=torch.bfloat16)
    # A distance that wraps to a negative one still lies inside.
    return memory.as_strided(rows.shape, (width, 2**30, 1), 2**31).copy_(rows)


def call(name: str, provider: str, args: Mapping[str, Any]) -> Any:
    """Run an op through the dispatcher with one provider; ``args`` in the order of the schema."""
    with use_provider(name, provider):
        return OPS[name].overload(*args.values())


def assert_refused(name: str, args: Mapping[str, Any], argument: str, said: str = "") -> None:
    """The op raises ValueError that names itself, ``argument`` and ``said``, and writes nothing."""
    tensors = [a for a in args.values() if isinstance(a, torch.Tensor)]
    before = [as_bytes(t).clone() for t in tensors]
    for provider in ("reference", "triton"):
        with pytest.raises(ValueError, match=f"^{name}: {argument} must be .*{re.escape(said)}"):
            call(name, provider, args)
    assert all(torch.equal(as_bytes(t), old) for t, old in zip(tensors, before, strict=True))


def assert_refused_on_another_device(name: str, args: Mapping[str, Any], *arguments: str) -> None:
    """Each of ``arguments`` alone on another device is refused by name."""
    for argument in arguments:
        moved = {**args, argument: args[argument].to("meta")}
        with pytest.raises(ValueError, match=f"^{name}: {argument} must be on {DEVICE}.*got meta"):
            OPS[name].check(*moved.values())


def rope_table(max_positions: int = 97, rope_dim: int = 64) -> torch.Tensor:
    """float32 [max positions, rope_dim] = [cos | sin] of seeded angles."""
    angles = torch.rand(max_positions, rope_dim // 2, generator=generator(11)) * 6.3
    return torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE)


def integers(high: int, size: int, seed: int = 0) -> torch.Tensor:
    """int64 [size], values in [0, high)."""
    return torch.randint(high, (size,), generator=generator(seed)).to(DEVICE)


def distinct(high: int, size: int, seed: int = 0) -> torch.Tensor:
    """int64 [size], different values in [1, high): slot 0 is the dummy."""
    return (torch.randperm(high - 1, generator=generator(seed))[:size] + 1).to(DEVICE)


def bench(label: str, run: Callable[[], Any], nbytes: int, repeats: int = 50) -> float:
    """Median GPU time of ``run`` in us by CUDA events, printed with the memory traffic it amounts to.

    It is captured and replayed: launched one by one, small kernels would show the time of the host.
    """
    for _ in range(5):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()  # L2 cold, as between the layers of a model
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    us = statistics.median(times)
    print(f"{label}: {us:.1f} us, {nbytes / us / 1000:.0f} GB/s")
    return us

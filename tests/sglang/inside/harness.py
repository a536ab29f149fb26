"""Servers for the tests: a runner with one of SGLang's graph backends, its own or ours, on emulated CUDA graphs."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import torch

from . import fake_graphs, host, kernels, layers

RELEASE = version("sglang")
BREAKABLE, PIECEWISE = "breakable", "tc_piecewise"
# The flags whose graphs a sparse-attention model can use in this release.
FLAGS = {"0.5.13.post1": (PIECEWISE,), "0.5.14": (PIECEWISE,), "0.5.23": (BREAKABLE,)}.get(
    RELEASE, (BREAKABLE, PIECEWISE)
)  # fmt: skip
# (new tokens, prefix) per request, seed; TOPK is 8, so some are short and some are not.
BATCHES = [
    ([5], [0], 1), ([4, 3], [0, 0], 2), ([12], [0], 3), ([10, 9], [3, 20], 4), ([16], [0], 5), ([3], [2], 6),
    ([1], [50], 7), ([8], [0], 8), ([9], [0], 9), ([4, 20], [1, 0], 10),
]  # fmt: skip

# What the plug-in hooks at start-up.
CHOICE: tuple[Any, str]
if kernels.ONE_RUNNER:
    CHOICE = kernels.srt("model_executor.model_runner").ModelRunner, "init_piecewise_cuda_graphs"
else:
    CHOICE = kernels.srt("model_executor.runner_backend.utils"), "resolve_prefill_backend"
# The flag's name in the log.
SAID = {PIECEWISE: "piecewise"} if kernels.ONE_RUNNER else {}

# Exact and nearly exact buckets, one row, several requests on both sides of TOPK.
EDGES = [
    ([16], [0], 1), ([16], [30], 2), ([32], [0], 3), ([32], [20], 4), ([17], [0], 5), ([1], [0], 6), ([1], [7], 7),
    ([1], [8], 8), ([8, 8], [0, 0], 9), ([8, 8, 8, 8], [0, 0, 0, 0], 10), ([4, 4, 4, 4], [4, 5, 3, 0], 11),
    ([1, 1, 1, 1], [50, 3, 7, 8], 12), ([31], [1], 13), ([15, 1], [0, 0], 14),
]  # fmt: skip

# Of SGLang's own runners, in which a bucket takes batches of half its rows and more.
STEPS = [
    ([8], [0], 1), ([10, 9], [3, 20], 2), ([9, 10], [20, 3], 3), ([4, 5], [0, 0], 4), ([16], [0], 5),
    ([5, 4], [3, 0], 6), ([1, 7, 8], [7, 1, 0], 7), ([12], [50], 8), ([30], [0], 9), ([8, 8, 8], [0, 0, 0], 10),
]  # fmt: skip

device_module = fake_graphs.device_module()


class NoA2A:
    """No expert parallelism."""

    def is_deepep(self) -> bool:
        return False

    is_mooncake = is_deepep


def prepare() -> None:
    """Once a process: kernels, graphs and a process group of one."""
    kernels.patch_kernels()
    graphs = kernels.SEGMENTED
    if hasattr(graphs, "get_device_module"):
        graphs.get_device_module = lambda: device_module
    else:
        for name, value in vars(device_module).items():
            setattr(torch.cuda, name, value)
    graphs._check_cuda_bindings = lambda: None
    torch.cuda.CUDAGraph = fake_graphs.FakeGraph  # type: ignore[misc, assignment]
    torch.cuda.graph = fake_graphs.capture  # type: ignore[misc, assignment]
    for name in () if kernels.ONE_RUNNER else (BREAKABLE, PIECEWISE):
        module = kernels.srt(f"model_executor.runner_backend.{name}_cuda_graph_backend")
        module.set_graph_pool_id = lambda pool: None
        module.get_or_create_global_graph_memory_pool = lambda device: (0, 7)
        if hasattr(module, "get_moe_a2a_backend"):
            module.get_moe_a2a_backend = NoA2A
        if hasattr(module, "get_tensor_model_parallel_rank"):
            module.get_tensor_model_parallel_rank = lambda: 0
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def make_body(seed: int = 0) -> Any:
    """A transformer body with weights of its own."""
    torch.manual_seed(seed)
    return layers.Body()


class Server:
    """A runner and its backend (the runner, in releases that have one). ours: through the plug-in's hook."""

    def __init__(self, body: Any, flag: str, ours: bool, **arguments: Any) -> None:
        body = copy.deepcopy(body)
        if kernels.ONE_RUNNER:
            from .one_runner import Runner

            self.runner = Runner(body, device_module)
            vars(self.runner.model_runner.server_args).update(arguments)
            self.backend = self.runner.build(RELEASE, ours)
            return
        self.runner = host.Runner(body, layers.Outer(body), flag, device_module)
        vars(self.runner.model_runner.server_args).update(arguments)
        module = kernels.srt(f"model_executor.runner_backend.{flag}_cuda_graph_backend")
        cls = module.BreakableCudaGraphBackend if flag == BREAKABLE else module.TcPiecewiseCudaGraphBackend

        def own(runner: Any) -> Any:
            return cls(runner)

        if ours:
            from sparse_pcg.integrations.sglang.hooks import choose_backend

            self.backend = choose_backend(RELEASE, own, self.runner)
        else:
            self.backend = own(self.runner)
        self.runner.capture(self.backend)

    def prefill(self, new: list[int], prefix: list[int], seed: int) -> torch.Tensor:
        """The valid rows of one prefill, replayed."""
        return self.runner.replay(self.backend, new, prefix, seed)

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent KV and index keys of every slot but 0, which belongs to no request."""
        pool = self.runner.pool
        return pool.latent[:, 1:], pool.index[:, 1:]

    @property
    def served(self) -> Any:
        """What holds our graphs: ``serving``, ``variants``."""
        return getattr(self.backend, "prefill", self.backend)

    @property
    def graphs(self) -> dict[int, Any]:
        """bucket -> variant -> recorded prefill."""
        found: dict[int, Any] = self.served.variants.graphs
        return found


Served = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def served(server: Server, batches: Any = BATCHES) -> list[Served]:
    """Output, latent KV and index keys after each batch."""
    found = []
    for new, prefix, seed in batches:
        output = server.prefill(new, prefix, seed)
        assert torch.isfinite(output).all()
        found.append((output, *(pool.clone() for pool in server.pools())))
    return found


def expected(body: Any, flag: str, batches: Any = BATCHES) -> list[Served]:
    """What SGLang's own graphs of this flag give, from a server that serves alone.

    Another model of the same code would take the first one's compiled graphs away.
    """
    return served(Server(body, flag, False), batches)


def equal(found: list[Served], wanted: list[Served]) -> None:
    """Every byte of outputs and caches."""
    assert len(found) == len(wanted)
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other), number

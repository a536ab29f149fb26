"""Where SGLang is hooked: one function at start-up, the rest when a server builds its prefill graphs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sparse_pcg.gates import ATTENTION as ATTENTION_GATE

from . import LAST, release_of
from .draft import capture_draft, is_one_layer_view
from .recording import (
    captured_attention,
    captured_indexer,
    cut_selection,
    replaced,
    select_everything,
    skips_logits,
)

logger = logging.getLogger("sparse_pcg")

_SRT = "sglang.srt"
CHOICE = f"{_SRT}.model_executor.runner_backend.utils.resolve_prefill_backend"
_MODEL_RUNNER = f"{_SRT}.model_executor.model_runner"
CONSTRUCTION = f"{_MODEL_RUNNER}.ModelRunner.init_piecewise_cuda_graphs"  # releases before there were backends
_MLA = f"{_SRT}.models.deepseek_common.attention_forward_methods.forward_mla"
_INDEXER = f"{_SRT}.layers.attention.dsa.dsa_indexer"
_SETUP = f"{_SRT}.model_executor.model_runner_components.cuda_graph_setup"

# Breaks that run attention over a selection, by the names of the releases that have them.
ATTENTION = (
    f"{_MLA}.bcg_mla_bmm_then_unified_attention",
    f"{_MLA}.DeepseekMLAForwardMixin._eager_bmm_attention",
    f"{_SRT}.layers.radix_attention.breakable_unified_attention_with_output",
    f"{_SRT}.layers.radix_attention.RadixAttention._eager_attention",
)
INDEXER = (f"{_INDEXER}.bcg_dsa_indexer_prefill_split",)


def register(release: str) -> None:
    """Hook SGLang's choice of a prefill backend, or its construction of the runner that is one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (release_of(release) or LAST) < (0, 5, 14):
        HookRegistry.register(CONSTRUCTION, construct_with(release), HookType.AROUND)
        return

    def choose(original: Callable[..., Any], cuda_graph_runner: Any) -> Any:
        return choose_backend(release, original, cuda_graph_runner)

    HookRegistry.register(CHOICE, choose, HookType.AROUND)


def choose_backend(release: str, original: Callable[..., Any], cuda_graph_runner: Any) -> Any:
    """Our backend where SGLang would take its own of the same flag; SGLang's wherever ours cannot serve."""
    flag, make = _flag(cuda_graph_runner), None
    if flag in ("breakable", "tc_piecewise"):
        try:
            make = _maker(flag, release, cuda_graph_runner)
        except Exception:
            logger.exception("sparse_pcg: SGLang %s %s: cannot serve, SGLang's own graphs are used", release, flag)
    if make is not None:
        return make()
    if is_one_layer_view(cuda_graph_runner.model_runner):
        raise RuntimeError("SGLang's own graphs of a NextN draft would leave its seed unwritten")
    return original(cuda_graph_runner)


def construct_with(release: str) -> Callable[..., Any]:
    """The hook around SGLang's construction of its piecewise runner: inside it, the class is ours."""

    def hook(original: Callable[..., Any], model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(_MODEL_RUNNER)
        make = partial(_construct, release, module.PiecewiseCudaGraphRunner)
        with replaced(module, "PiecewiseCudaGraphRunner", make):
            return original(model_runner, *args, **kwargs)

    return hook


def _construct(release: str, own: Callable[[Any], Any], model_runner: Any) -> Any:
    """Our runner, or SGLang's ``own`` where ours cannot serve."""
    from .deployment import is_sparse

    why = ""
    if not is_sparse(model_runner.attn_backend):
        why = "the attention is not sparse attention"
    elif model_runner.is_draft_worker:
        why = "the prefill of a draft"
    elif model_runner.spec_algorithm.is_eagle() and not model_runner.server_args.enable_return_hidden_states:
        why = "a draft asks for hidden states, and this release replays no batch that does"
    if why:
        logger.info("sparse_pcg: SGLang %s piecewise: SGLang's own graphs; %s", release, why)
        return own(model_runner)
    try:
        install(release)
        from .piecewise_runner import SparsePCGPiecewiseRunner
    except Exception:
        logger.exception("sparse_pcg: SGLang %s piecewise: cannot serve, SGLang's own graphs are used", release)
        return own(model_runner)
    return SparsePCGPiecewiseRunner(model_runner, release)


def _flag(cuda_graph_runner: Any) -> str | None:
    """The kind of prefill graph that the server was started with."""
    flag: str | None = getattr(cuda_graph_runner, "prefill_backend_name", None)
    if flag is None:  # releases in which the runner does not keep it
        config = getattr(cuda_graph_runner.model_runner.server_args, "cuda_graph_config", None)
        flag = config.prefill.backend if config is not None else None
    return flag


def _maker(flag: str, release: str, cuda_graph_runner: Any) -> Callable[[], Any] | None:
    from .deployment import Serving, argument, is_sparse

    args = cuda_graph_runner.model_runner.server_args
    serving = Serving(cuda_graph_runner, release)
    if not is_sparse(serving.attn_backend):
        serving.report(flag, {})
        return None
    if flag == "tc_piecewise":
        if serving.draft:
            return None  # its seed is written after graphs of the other kind only
        install(release)
        from .piecewise import SparsePCGPiecewiseBackend

        return lambda: SparsePCGPiecewiseBackend(cuda_graph_runner, serving)
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    why = ""
    if not hasattr(BreakableCudaGraphBackend, "_output_rows"):
        why = "this release's breakable graphs do not serve sparse attention"
    elif argument(args, "debug_cuda_graph", False):
        why = "debug_cuda_graph"
    if why:
        serving.reasons = {ATTENTION_GATE: why}
        serving.attention = False
    if not serving.attention:
        serving.report(flag, {})
        return None
    install(release)
    from .breakable import SparsePCGBreakableBackend

    return lambda: SparsePCGBreakableBackend(
        cuda_graph_runner, serving, enable_memory_saver=argument(args, "enable_memory_saver", False)
    )


class _Bound:
    """A break of a class: binds like SGLang's own, so that ``run_eager`` keeps its instance."""

    def __init__(self, call: Callable[..., Any], original: Any) -> None:
        self._call, self._original = call, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._original, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Bound(self._call, self._original.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


_installed = False


def install(release: str) -> None:
    """Hook the breaks and the indexer of the installed release, and its capture of a draft, once."""
    global _installed
    if _installed:
        return
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .layout import eager_on_graph, running_batch

    indexer = importlib.import_module(_INDEXER).Indexer
    _installed = True  # what may be missing is there: from here on nothing is done twice
    for name in ATTENTION:
        _wrap(name, captured_attention)
    for name in INDEXER:
        _wrap(name, captured_indexer)

    def running() -> tuple[Any, Any]:
        return running_batch(), get_attn_backend()

    for method, hook in {
        "_forward_cuda_k_only": select_everything,
        "_should_skip_logits_computation": skips_logits,
        "_get_topk_ragged": cut_selection(eager_on_graph, running),
    }.items():
        if hasattr(indexer, method):
            HookRegistry.register(f"{_INDEXER}.Indexer.{method}", hook, HookType.AROUND)
    # A server captures its draft after its target, whose backend is being chosen.
    with suppress(ImportError):  # releases before, whose breakable graphs serve no sparse attention
        importlib.import_module(_SETUP)
        HookRegistry.register(f"{_SETUP}.capture_prefill_graph", capture_draft(release), HookType.AROUND)
    HookRegistry.apply_hooks()


def _wrap(name: str, hook: Callable[..., Any]) -> None:
    """Put ``hook`` around a break, where this release has it. Module-level names are looked up at each call."""
    path, attribute = name.rsplit(".", 1)
    owner: Any
    try:
        owner = importlib.import_module(path)
    except ImportError:
        module, cls = path.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), cls, None)
    original = getattr(owner, "__dict__", {}).get(attribute)
    if original is None or isinstance(original, _Bound):
        return
    setattr(owner, attribute, _Bound(hook, original))

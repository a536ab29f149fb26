"""SGLang's NextN draft extend in prefill graphs: a view of its one layer, and the seed that its decode steps take.

SGLang builds prefill graphs for a draft whose body has a list of layers; the NextN body has one decoder instead, and is
left eager. Its seed, the selection at each request's last row, goes to a buffer and from rows that change with every
step, so it is written by a live call after the graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparse_pcg.counters import COUNTS, count_fallback
from sparse_pcg.gates import DRAFT

logger = logging.getLogger("sparse_pcg")


def _nextn_body(model_runner: Any) -> Any:
    """The draft's body where it is one decoder with an indexer, else None."""
    body = getattr(model_runner.model, "model", None)
    attention = getattr(getattr(body, "decoder", None), "self_attn", None)
    return None if getattr(attention, "indexer", None) is None else body


def is_one_layer_view(model_runner: Any) -> bool:
    """Whether the runner's model is a NextN draft whose layer is in view."""
    return _nextn_body(model_runner) is not None and "layers" in vars(model_runner.model.model)


@contextmanager
def one_layer_view(model_runner: Any) -> Iterator[None]:
    """Inside the block the NextN body of a draft runner has ``layers``, and the model is as deep as that.

    The list is no part of the module: its decoder would have a second name otherwise.
    """
    body, config = model_runner.model.model, model_runner.model_config
    before = config.num_hidden_layers
    vars(body)["layers"] = [body.decoder]
    config.num_hidden_layers = 1
    try:
        yield
    finally:
        config.num_hidden_layers = before
        del vars(body)["layers"]


def capture_draft(release: str) -> Callable[..., Any]:
    """The hook around SGLang's ``capture_prefill_graph``: a NextN draft is captured, or one line says why not."""

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model_runner = kwargs["model_runner"]
        if not kwargs.get("force_for_draft_worker") or _nextn_body(model_runner) is None:
            return original(*args, **kwargs)
        try:
            from .deployment import draft_refusal

            with one_layer_view(model_runner):
                refused = draft_refusal(model_runner)
                if not refused:
                    return original(*args, **kwargs)
            COUNTS.fallbacks[f"gate:{DRAFT}"] += 1
            logger.info("sparse_pcg: SGLang %s draft: runs uncaptured; %s", release, refused)
        except Exception:
            logger.exception("sparse_pcg: SGLang %s draft: cannot be captured, runs uncaptured", release)
        return original(*args, **kwargs)

    return hook


class Draft:
    """Beside the graphs of a NextN draft: where each leaves its selection, and which batches they serve.

    selections: what a replay of (bucket, variant) leaves, int32 [bucket, index_topk], physical slots.
    """

    def __init__(self, cuda_graph_runner: Any) -> None:
        self._decoder = cuda_graph_runner.model_runner.model.model.decoder
        self.selections: dict[tuple[int, str], Any] = {}
        self._can_run = cuda_graph_runner.can_run_graph
        cuda_graph_runner.can_run_graph = self.can_run
        _index_by_layer(cuda_graph_runner, self._decoder.self_attn.layer_id)

    def can_run(self, forward_batch: Any) -> bool:
        """Whether a batch replays: a prefill of tokens. Steps of the draft's decoding and embeddings given do not."""
        if not forward_batch.forward_mode.is_extend_without_speculative():
            return False
        given = (forward_batch.input_embeds, getattr(forward_batch, "mm_input_embeds", None))
        if any(embeds is not None for embeds in given) or forward_batch.contains_mm_inputs():
            count_fallback("multimodal", "the draft's prefill was given embeddings")
            return False
        return bool(self._can_run(forward_batch))

    @contextmanager
    def selection(self) -> Iterator[list[Any]]:
        """Gives a list that holds the selection of the last forward inside the block, and keeps its memory there."""
        found: list[Any] = []

        def keep(decoder: Any, args: Any, output: Any) -> None:
            found[:] = [output[-1]]

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()

    @contextmanager
    def captured(self, bucket: int, variant: str) -> Iterator[None]:
        """Around the capture of one graph: its selection is where every replay leaves it."""
        from .layout import segmented

        with self.selection() as found:
            yield
        # The graphs hold the memory, as they do that of a break's arguments.
        self.selections[bucket, variant] = segmented._weak_ref_if_tensor(found[-1])


def _index_by_layer(cuda_graph_runner: Any, layer_id: int) -> None:
    """SGLang looks layers up in lists, by their number: put the draft's only one where its number says."""
    for name in ("attention_layers", "mha_companion_layers", "moe_layers", "moe_fusions", "dsa_indexers"):
        layers = getattr(cuda_graph_runner, name, None)
        if layers is not None and 0 < len(layers) <= layer_id:
            setattr(cuda_graph_runner, name, [None] * layer_id + [layers[-1]])


def write_seed(forward_batch: Any, selection: Any) -> None:
    """Write the seed that a batch asks for, as SGLang does after an uncaptured forward.

    selection: int32 [rows, index_topk]; None where the model hands none on.
    """
    if selection is None:
        return
    try:
        from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState
    except ImportError:  # releases whose model writes it
        spec = forward_batch.spec_info
        seed, rows = spec.dsa_seed_topk_capture, spec.dsa_seed_topk_select
        if seed is not None:
            chosen = selection[: seed.shape[0]] if rows is None else selection[rows]
            seed[: chosen.shape[0]].copy_(chosen)
        return
    state = IndexTopKShareState.from_mtp_carry(forward_batch)
    state.update(selection)
    state.publish()

"""What runs while a prefill is recorded for SGLang: which of its graph breaks are captured, and where it is cut.

SGLang's own functions do the work. Inside ``recording`` the hooks of this file decide, for each break that SGLang would
make, whether its body is captured in place (attention, the indexer's projections and store) or stays a live call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .rows import Rows

CUT, SHORT = "cut", "short"


@dataclass
class Recording:
    """variant: ``cut`` (logits + top-k stay live) or ``short`` (every visible token is selected; nothing is live).

    indexer: the indexer's projections and store are captured. capture_var: SGLang's variable of the current capture.
    """

    variant: str
    indexer: bool
    rows: Rows
    capture_var: Any
    batch: Any = None  # the batch that runs, where SGLang's context holds a dummy

    @contextmanager
    def inline(self) -> Iterator[Any]:
        """Inside the block SGLang's breaks are plain calls, and so are captured; gives the capture set aside."""
        capture = self.capture_var.get()
        token = self.capture_var.set(None)
        try:
            yield capture
        finally:
            self.capture_var.reset(token)


class _Current(threading.local):
    recording: Recording | None = None
    capture: Any = None  # the capture that ``inline`` set aside


_current = _Current()


def current() -> Recording | None:
    """The recording under way in this thread."""
    return _current.recording


@contextmanager
def recording(value: Recording) -> Iterator[Recording]:
    """Make ``value`` current in this thread inside the block."""
    before = _current.recording
    _current.recording = value
    try:
        yield value
    finally:
        _current.recording = before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block ``owner.name`` is ``value``."""
    own = vars(owner).get(name, owner)  # itself: a method of its class
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is owner else setattr(owner, name, own)


def captured_attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around a break that runs attention: captured where it attends a selection of tokens."""
    now = current()
    if now is None or kwargs.get("topk_indices") is None:
        return original(*args, **kwargs)
    with now.inline():
        return original(*args, **kwargs)


def captured_indexer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the break that runs the whole indexer: captured, up to the cut that ``cut_selection`` makes in it."""
    now = current()
    if now is None or not now.indexer:
        return original(*args, **kwargs)
    selection = kwargs["topk_result"]
    if now.variant == CUT and selection.numel():
        selection[:, 0] = 0  # pad rows attend slot 0; the live call writes every real row
    before = _current.capture
    with now.inline() as capture:
        _current.capture = capture
        try:
            return original(*args, **kwargs)
        finally:
            _current.capture = before


def select_everything(original: Callable[..., Any], indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the indexer's store-only path: in the short variant the selection is written by a captured kernel."""
    now = current()
    selection = kwargs.get("topk_result")
    if now is None or now.variant != SHORT or selection is None or not selection.numel():
        return original(indexer, *args, **kwargs)
    kwargs.update(return_indices=False, topk_result=None)
    original(indexer, *args, **kwargs)
    now.rows.select_all(selection)
    return None


def skips_logits(original: Callable[..., Any], indexer: Any, forward_batch: Any) -> bool:
    """Around the indexer's choice to store only: while recording the variant decides, not the dummy batch."""
    now = current()
    if now is None or not now.indexer:
        return original(indexer, forward_batch)
    return now.variant == SHORT


def cut_selection(eager_on_graph: Callable[..., Any], get_context: Callable[[], Any]) -> Callable[..., Any]:
    """The hook around the indexer's logits + top-k: while recording the cut variant, a live call.

    eager_on_graph: SGLang's break decorator. get_context: gives SGLang's prefill context of the running batch.
    """

    def hook(
        original: Callable[..., Any],
        indexer: Any,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: Any,
        weights: Any,
        metadata: Any,
        topk_result: Any = None,
    ) -> Any:
        now = current()
        if now is None or not now.indexer or topk_result is None:
            return original(indexer, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result)
        if now.variant == SHORT:  # releases whose split op always comes here
            now.rows.select_all(topk_result)
            return topk_result

        def logits_and_topk(q: Any, w: Any, selection: Any) -> None:
            batch, backend = get_context()
            live_recording = current()
            if live_recording is not None and live_recording.batch is not None:
                batch = live_recording.batch
            n = batch.extend_num_tokens
            live = backend.get_indexer_metadata(layer_id, batch)
            original(indexer, False, batch, layer_id, q[:n], w[:n], live, selection)

        token = now.capture_var.set(_current.capture)
        try:
            eager_on_graph(True)(logits_and_topk)(q_fp8, weights, topk_result)
        finally:
            now.capture_var.reset(token)
        return topk_result

    return hook

"""The reference model served by hand: batches laid out row by row in plain Python, selections collected."""

from __future__ import annotations

import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata, use_context
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import preset
from sparse_pcg.models.dsa import Attention

TINY = preset("tiny")


def new_kv(config=TINY, num_pages=20, layout="bf16", dtype=torch.float32, device="cpu"):
    return PagedKV(config.num_layers, num_pages, layout, config.index_layers, dtype, device, poison=True)


def tokens(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(model, kv, chunks, pad_to=None, pad_id=0):
    """Run one batch of (request, new tokens) and return each request's hidden states, [new tokens, hidden].

    The rows are laid out here in plain Python, and the tail past them padded to ``pad_to`` rows.
    """
    rows, device = sum(len(new) for _, new in chunks), model.embed_tokens.device
    size = pad_to or rows
    metadata = BatchMetadata.allocate(size, max(len(chunks), 1), kv.num_pages, model.config.index_topk, device)
    metadata.input_ids.fill_(pad_id)
    at = 0
    for number, (request, new) in enumerate(chunks):
        start = request.num_tokens
        request.extend(len(new))
        metadata.page_table[number, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        for position, token in enumerate(new, start):
            metadata.input_ids[at] = token
            metadata.positions[at] = position
            metadata.slots[at] = request.pages[position // PAGE] * PAGE + position % PAGE
            metadata.kv_lens[at] = position + 1
            metadata.select_lens[at] = min(position + 1, model.config.index_topk)
            metadata.request_of_row[at] = number
            at += 1
        metadata.max_kv_len = max(metadata.max_kv_len, request.num_tokens)
    metadata.num_rows, metadata.num_requests = rows, len(chunks)
    metadata.num_rows_device.fill_(rows)
    with use_context(kv.context(metadata)), torch.no_grad():
        hidden = model(metadata.input_ids, metadata.positions, metadata.kv_lens)
    return hidden[:rows].split([len(new) for _, new in chunks])


def serve(model, prompt, chunk_sizes=None, **kv_arguments):
    """Hidden states of ``prompt`` served alone in a pool of its own, in the given chunks."""
    kv = new_kv(model.config, **kv_arguments)
    at, parts = 0, []
    with kv.request() as request:
        for size in chunk_sizes or [len(prompt)]:
            parts += prefill(model, kv, [(request, prompt[at : at + size])])
            at += size
    assert at == len(prompt)
    return torch.cat(parts)


def distance(got, expected):
    """Relative L2 distance."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


class Selections:
    """Collects the selection that each layer attended, as lists of positions of a request served alone."""

    def __init__(self, model):
        self.by_layer = {}
        self.hooks = [
            module.register_forward_hook(self._keep) for module in model.modules() if isinstance(module, Attention)
        ]

    def _keep(self, module, args, output):
        self.by_layer[module.layer_id] = output[1].clone()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def visible(self, layer, pages, rows=slice(None)):
        """bool [T, T]: which positions each of the ``rows``, all of one request, selected."""
        slots = self.by_layer[layer][rows]
        mask = torch.zeros(len(slots), len(slots), dtype=torch.bool)
        for row, chosen in enumerate(slots.tolist()):
            kept = [pages.index(slot // PAGE) * PAGE + slot % PAGE for slot in chosen if slot >= 0]
            assert len(set(kept)) == len(kept) == min(row + 1, slots.shape[1])
            mask[row, kept] = True
        return mask

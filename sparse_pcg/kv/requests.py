"""The pages of one request, and the page table of a batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from custom_ops.batch_metadata import PAGE

from .allocator import PageAllocator


class RequestPages:
    """The pages that hold one request's tokens, in order: page p holds its tokens 64p .. 64p+63.

    ``num_tokens`` counts the tokens that the pages are reserved for. Closing (or leaving a ``with`` block)
    gives every page back.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.pages: list[int] = []
        self.num_tokens = 0

    @classmethod
    def with_prefix(cls, source: RequestPages, num_tokens: int) -> RequestPages:
        """A request that starts with the first ``num_tokens`` tokens of ``source``, in the same pages.

        Only full pages can be shared: a page that ``source`` still writes to is not. Raises ValueError
        unless ``num_tokens`` is a multiple of 64 and at most ``source.num_tokens``.
        """
        if num_tokens % PAGE or not 0 <= num_tokens <= source.num_tokens:
            raise ValueError(
                f"with_prefix: num_tokens must be a multiple of {PAGE} and at most "
                f"{source.num_tokens}, got {num_tokens}"
            )
        request = cls(source.allocator)
        pages = source.pages[: num_tokens // PAGE]
        source.allocator.share(pages)
        request.pages, request.num_tokens = list(pages), num_tokens
        return request

    def extend(self, new_tokens: int) -> None:
        """Reserve room for ``new_tokens`` more tokens, or raise OutOfPages and reserve nothing."""
        if new_tokens < 0:
            raise ValueError(f"extend: new_tokens must be >= 0, got {new_tokens}")
        needed = -(-(self.num_tokens + new_tokens) // PAGE)
        self.pages += self.allocator.allocate(needed - len(self.pages))
        self.num_tokens += new_tokens

    def close(self) -> None:
        """Give the pages back; the request is empty afterwards."""
        pages, self.pages, self.num_tokens = self.pages, [], 0
        self.allocator.free(pages)

    def __enter__(self) -> RequestPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def page_table(requests: Sequence[RequestPages], device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 [requests, pages of the longest]: entry [b, p] is page p of request b.

    Entries past a request's last page are 0, the page of the dummy slot.
    """
    width = max((len(r.pages) for r in requests), default=0)
    rows = [r.pages + [0] * (width - len(r.pages)) for r in requests]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(requests), width).to(device)

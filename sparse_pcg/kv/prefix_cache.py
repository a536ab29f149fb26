"""Computed pages, found again by the tokens they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from custom_ops.batch_metadata import PAGE

from .pool import PagedKV
from .requests import RequestPages

_Key = tuple[int, tuple[int, ...]]  # the page before it (0: none), and its tokens


class PrefixCache:
    """Holds full pages of prompts, so that a prompt with the same beginning starts from them.

    The pages that were used least recently go first when room is needed, the end of a prompt before its beginning.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self._pages: OrderedDict[_Key, int] = OrderedDict()  # a page always stands before those that it follows

    def __len__(self) -> int:
        """How many pages are held."""
        return len(self._pages)

    def request(self, tokens: Sequence[int]) -> RequestPages:
        """A request that begins with the longest cached prefix of ``tokens``, but for their last token."""
        found = list(self._walk(tokens[: max(len(tokens) - 1, 0)]))
        request = self.kv.request()
        pages = [self._pages[key] for key in found]
        self.kv.allocator.share(pages)
        request.pages, request.num_tokens = pages, len(pages) * PAGE
        self._touch(found)
        return request

    def insert(self, tokens: Sequence[int], request: RequestPages) -> None:
        """Hold the full pages of ``tokens``, the first tokens of ``request``, all of which are computed."""
        before, keys = 0, []
        for i in range(len(tokens) // PAGE):
            key = (before, tuple(tokens[i * PAGE : (i + 1) * PAGE]))
            if key not in self._pages:
                self.kv.allocator.share([request.pages[i]])
                self._pages[key] = request.pages[i]
            before = self._pages[key]
            keys.append(key)
        self._touch(keys)

    def make_room(self, pages: int) -> bool:
        """Let go of pages until ``pages`` are free. Returns whether they are."""
        while self.kv.allocator.num_free < pages and self._pages:
            _, page = self._pages.popitem(last=False)
            self.kv.allocator.free([page])
        return self.kv.allocator.num_free >= pages

    def close(self) -> None:
        """Let go of all pages."""
        self.kv.allocator.free(self._pages.values())
        self._pages.clear()

    def _walk(self, tokens: Sequence[int]) -> Iterator[_Key]:
        before = 0
        for i in range(len(tokens) // PAGE):
            key = (before, tuple(tokens[i * PAGE : (i + 1) * PAGE]))
            if key not in self._pages:
                return
            yield key
            before = self._pages[key]

    def _touch(self, keys: list[_Key]) -> None:
        for key in reversed(keys):
            self._pages.move_to_end(key)

"""Pages of the KV pools: who holds which, counted.

A page is 64 consecutive slots. Page 0 holds the dummy slot, which pad rows write to and attend; it is never
handed out. A page may be held several times (requests that share a prefix) and is free again when the last
holder lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; nothing was handed out."""


class PageAllocator:
    """Hands out page numbers 1 .. num_pages - 1.

    on_free: each is called with the list of pages that just became free. on_short: called with the number of pages
    that an allocation lacks, before it fails.
    Every method either does all that it was asked or raises and changes nothing.
    """

    def __init__(self, num_pages: int, on_free: Callable[[list[int]], None] | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"PageAllocator: num_pages must be at least 2 (page 0 is kept), got {num_pages}")
        self.num_pages = num_pages
        self.on_free = [] if on_free is None else [on_free]
        self.on_short: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """How many pages can be handed out."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many times ``page`` is held; 0 for a free one."""
        return self._holders.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each held once now. Raises OutOfPages if fewer are free."""
        if count < 0:
            raise ValueError(f"PageAllocator: count must be >= 0, got {count}")
        if count > len(self._free) and self.on_short is not None:
            self.on_short(count - len(self._free))
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold ``pages`` once more. Raises ValueError if one of them is not held by anyone."""
        pages = list(pages)
        self._require_held(Counter(dict.fromkeys(pages, 1)), "shared")
        for page in pages:
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Let go of ``pages`` once each; those that no one holds any more become free.

        Raises ValueError naming the page if one was never handed out, or is let go more often than it is
        held.
        """
        counts = Counter(pages)
        self._require_held(counts, "freed")
        released = []
        for page, count in counts.items():
            self._holders[page] -= count
            if not self._holders[page]:
                del self._holders[page]
                released.append(page)
        self._free += reversed(released)
        if released:
            for react in self.on_free:
                react(released)

    def close(self) -> None:
        """Check that every page came back. Raises RuntimeError naming the pages still held."""
        if self._holders:
            raise RuntimeError(f"leak: pages still held: {sorted(self._holders)}")

    def _require_held(self, counts: Counter[int], verb: str) -> None:
        for page, count in counts.items():
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} cannot be {verb}: the pool has pages 0 to {self.num_pages - 1}")
            if page == 0:
                raise ValueError(f"page 0 cannot be {verb}: it holds the dummy slot and belongs to no one")
            held = self._holders.get(page, 0)
            if count > held:
                raise ValueError(f"page {page} cannot be {verb} {count} time(s): it is held {held} time(s)")

"""Paged KV pools, their allocator, and typed views of the caches."""

from .allocator import OutOfPages, PageAllocator
from .pool import PagedKV
from .requests import RequestPages, page_table
from .views import LayerReader, LayerWriter

__all__ = [
    "LayerReader",
    "LayerWriter",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "RequestPages",
    "page_table",
]

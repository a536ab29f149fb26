"""Paged KV pools, their allocator, typed views of the caches, and pages in host memory."""

from .allocator import OutOfPages, PageAllocator
from .host import EvictedPages, HostKV
from .pool import PagedKV
from .prefix_cache import PrefixCache
from .requests import RequestPages, page_table
from .transfers import TransferError
from .views import LayerReader, LayerWriter

__all__ = [
    "EvictedPages",
    "HostKV",
    "LayerReader",
    "LayerWriter",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "PrefixCache",
    "RequestPages",
    "TransferError",
    "page_table",
]

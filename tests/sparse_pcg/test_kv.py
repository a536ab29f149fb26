"""KV pools: byte layouts decoded by hand, pages counted against a plain model, prefixes shared."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.batch_metadata import BatchMetadata
from sparse_pcg.kv import OutOfPages, PageAllocator, PagedKV, RequestPages, page_table

LAYOUTS = ("bf16", "fp8_packed", "fp8")


def rows(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_rows, 512, generator=generator).bfloat16(),
        torch.randn(num_rows, 64, generator=generator).bfloat16(),
    )


# --- pools and views --------------------------------------------------------------------------------------


def test_shapes_dtypes_and_zeroed_memory():
    kv = PagedKV(3, 4, "fp8_packed", index_layers=(0, 2))
    assert sorted(kv.latent_kv) == [0, 1, 2]
    assert sorted(kv.index_k) == [0, 2]
    assert all(t.shape == (256, 656) and t.dtype == torch.uint8 for t in kv.latent_kv.values())
    assert all(t.shape == (4, 8448) and t.dtype == torch.uint8 for t in kv.index_k.values())
    assert not kv.latent_pool.any() and not kv.index_pool.any()
    assert kv.nbytes == 3 * 256 * 656 + 2 * 4 * 8448
    assert PagedKV(1, 2).latent_kv[0].dtype == torch.bfloat16
    assert PagedKV(1, 2, dtype=torch.float32).latent_kv[0].dtype == torch.float32
    assert PagedKV(1, 2, "fp8", dtype=torch.float32).latent_kv[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_views_of_one_allocation_and_do_not_overlap(layout):
    kv = PagedKV(3, 2, layout, index_layers=(1, 2))
    for pool, caches in ((kv.latent_pool, kv.latent_kv), (kv.index_pool, kv.index_k)):
        for number, cache in enumerate(caches.values()):
            assert cache.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
            assert cache.is_contiguous()
            cache.view(torch.uint8).fill_(number + 1)
        for number, cache in enumerate(caches.values()):
            assert (cache.view(torch.uint8) == number + 1).all()


def test_packed_row_decoded_by_hand():
    kv = PagedKV(1, 2, "fp8_packed")
    row = kv.latent_kv[0][70]
    row[0] = 0x38  # e4m3 1.0, group 0
    row[127] = 0xC0  # e4m3 -2.0, last of group 0
    row[128] = 0x38  # group 1
    row[511] = 0x3C  # e4m3 1.5, last of group 3
    row[512:516] = torch.tensor([0x00, 0x00, 0x00, 0x3F])  # 0.5
    row[516:520] = torch.tensor([0x00, 0x00, 0x40, 0x40])  # 3.0
    row[524:528] = torch.tensor([0x00, 0x00, 0x80, 0x3E])  # 0.25
    row[528:530] = torch.tensor([0x80, 0xBF])  # bf16 -1.0, first rotated value
    row[654:656] = torch.tensor([0x00, 0x40])  # bf16 2.0, last
    expected = torch.zeros(128, 576)
    expected[70, [0, 127, 128, 511, 512, 575]] = torch.tensor([0.5, -1.0, 3.0, 0.375, -1.0, 2.0])
    assert torch.equal(kv.read(0).key(), expected)


def test_index_page_decoded_by_hand():
    kv = PagedKV(1, 3)
    page = kv.index_k[0][1]
    page[0] = 0x38  # token 0, dim 0: 1.0
    page[63 * 128 + 127] = 0xBC  # token 63, dim 127: -1.5
    page[8192:8196] = torch.tensor([0x00, 0x00, 0x00, 0x40])  # token 0: 2.0
    page[8444:8448] = torch.tensor([0x00, 0x00, 0x80, 0x3E])  # token 63: 0.25
    expected = torch.zeros(192, 128)
    expected[64, 0] = 2.0
    expected[127, 127] = -0.375
    assert torch.equal(kv.read(0).index_key(), expected)


# what e4m3 (3 mantissa bits) loses at most, relative to the row's or group's largest value for scaled
# layouts
TOLERANCE = {"bf16": 0.0, "fp8_packed": 2.0**-4, "fp8": 2.0**-4}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_latent_rows_read_back_where_they_were_stored(layout):
    kv = PagedKV(2, 4, layout)
    k_nope, k_rope = rows(5)
    slots = torch.tensor([64, 255, 130, 65, 100])
    kv.layer(1).store_mla(k_nope, k_rope, slots)
    key = kv.read(1).key()
    stored = torch.cat((k_nope, k_rope), dim=1).float()
    error = (key[slots] - stored).abs()
    assert (error <= TOLERANCE[layout] * stored.abs() + (0 if layout == "bf16" else 2e-3)).all()
    if layout == "fp8_packed":
        assert torch.equal(key[slots, 512:], k_rope.float())
    untouched = torch.ones(256, dtype=torch.bool)
    untouched[slots] = False
    assert not key[untouched].any()
    assert not kv.read(0).key().any()


@pytest.mark.parametrize("round_scale", [False, True])
def test_stored_index_keys_read_back(round_scale):
    kv = PagedKV(2, 3, index_layers=(1,))
    key = rows(4)[0][:, :128].contiguous()
    slots = torch.tensor([64, 191, 127, 128])
    kv.layer(1).store_index_k(key, slots, round_scale)
    got = kv.read(1).index_key()
    error = (got[slots] - key.float()).abs()
    assert (error <= 2.0**-4 * key.float().abs() + 2e-3).all()
    got[slots] = 0
    assert not got.any()
    scales = kv.index_k[1][1:, 8192:].contiguous().view(torch.float32).flatten()[slots - 64]
    assert (torch.frexp(scales).mantissa == 0.5).all() == round_scale


def test_a_layer_without_an_indexer_has_no_index_cache():
    kv = PagedKV(2, 2, index_layers=(0,))
    with pytest.raises(ValueError, match="layer 1 has no indexer"):
        kv.read(1).index_key()
    with pytest.raises(ValueError, match="layer 1 has no indexer"):
        kv.layer(1).store_index_k(torch.zeros(1, 128), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="layer_id must be one of 0 to 1, got 2"):
        kv.read(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "int4"}, "layout must be one of"),
        ({"dtype": torch.float64}, "dtype must be"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"index_layers": (0, 2)}, "index_layers must be distinct ids below 2"),
        ({"index_layers": (1, 1)}, "index_layers must be distinct ids below 2"),
    ],
)
def test_bad_pool_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PagedKV(**{"num_layers": 2, "num_pages": 4, **arguments})


def test_context_holds_the_caches_and_the_metadata():
    kv = PagedKV(2, 2, "fp8", index_layers=(1,))
    metadata = BatchMetadata.allocate(8, 2, 4, 64, "cpu")
    context = kv.context(metadata, workspace_bytes=123)
    assert context.metadata is metadata
    assert context.kv_layout == "fp8"
    assert context.workspace_bytes == 123
    assert context.tensor("latent_kv", 1) is kv.latent_kv[1]
    assert context.tensor("index_k", 1) is kv.index_k[1]


# --- pages ------------------------------------------------------------------------------------------------


def test_pages_are_handed_out_once_and_never_page_0():
    allocator = PageAllocator(5)
    pages = allocator.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    with pytest.raises(OutOfPages, match="1 pages asked for, 0 of 4 are free"):
        allocator.allocate(1)
    allocator.free(pages)
    allocator.close()
    assert allocator.num_free == 4


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([1, 1], "page 1 cannot be freed 2 time"),
        ([3], "page 3 cannot be freed"),
        ([0], "page 0 cannot be freed: it holds the dummy slot"),
        ([9], "page 9 cannot be freed: the pool has pages 0 to 4"),
        ([1, -1], "page -1 cannot be freed"),
    ],
)
def test_freeing_what_is_not_held_names_the_page_and_frees_nothing(freed, message):
    allocator = PageAllocator(5)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match=message):
        allocator.free(freed)
    assert allocator.num_free == 2
    assert [allocator.holders(page) for page in range(5)] == [0, 1, 1, 0, 0]
    with pytest.raises(RuntimeError, match=r"leak: pages still held: \[1, 2\]"):
        allocator.close()


def test_sharing_a_free_page_is_an_error():
    allocator = PageAllocator(5)
    allocator.allocate(1)
    with pytest.raises(ValueError, match="page 2 cannot be shared"):
        allocator.share([1, 2])
    assert allocator.holders(1) == 1


@given(st.data())
def test_allocator_against_a_counting_model(data):
    num_pages = data.draw(st.integers(2, 9))
    freed: list[int] = []
    allocator = PageAllocator(num_pages, on_free=freed.extend)
    held: Counter[int] = Counter()
    for _ in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(("allocate", "share", "free")))
        if action == "allocate":
            count = data.draw(st.integers(0, num_pages))
            if count > num_pages - 1 - len(held):
                with pytest.raises(OutOfPages):
                    allocator.allocate(count)
            else:
                pages = allocator.allocate(count)
                assert len(set(pages)) == count and not held.keys() & set(pages) and 0 not in pages
                held.update(pages)
        else:
            pages = data.draw(st.lists(st.integers(0, num_pages), max_size=4))
            change = Counter(pages)
            if action == "share":
                legal = all(held[page] for page in change)
            else:
                legal = all(held[page] >= count for page, count in change.items())
            method = getattr(allocator, action)
            if not legal:
                with pytest.raises(ValueError, match="page"):
                    method(pages)
            elif action == "share":
                method(pages)
                held.update(change)
            else:
                freed.clear()
                method(pages)
                held.subtract(change)
                assert sorted(freed) == sorted(page for page in change if not held[page])
        held = +held
        assert {page: allocator.holders(page) for page in range(num_pages) if allocator.holders(page)} == held
        assert allocator.num_free == num_pages - 1 - len(held)


# --- requests ---------------------------------------------------------------------------------------------


def test_a_request_takes_a_page_for_every_64_tokens():
    allocator = PageAllocator(8)
    with RequestPages(allocator) as request:
        for total, pages in ((0, 0), (1, 1), (64, 1), (65, 2), (128, 2), (192, 3)):
            request.extend(total - request.num_tokens)
            assert (request.num_tokens, len(request.pages)) == (total, pages)
        with pytest.raises(OutOfPages):
            request.extend(64 * 6)
        assert (request.num_tokens, len(request.pages), allocator.num_free) == (192, 3, 4)
    allocator.close()


def test_a_shared_prefix_outlives_its_first_holder():
    kv = PagedKV(1, 8)
    first = kv.request()
    first.extend(150)
    second = RequestPages.with_prefix(first, 128)
    second.extend(10)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    shared = first.pages[:2]
    first.close()
    assert [kv.allocator.holders(page) for page in shared] == [1, 1]
    with pytest.raises(RuntimeError, match="leak"):
        kv.close()
    second.close()
    kv.close()


@pytest.mark.parametrize("num_tokens", [-64, 63, 150, 192])
def test_only_full_pages_of_stored_tokens_can_be_shared(num_tokens):
    request = RequestPages(PageAllocator(8))
    request.extend(150)
    with pytest.raises(ValueError, match=f"multiple of 64 and at most 150, got {num_tokens}"):
        RequestPages.with_prefix(request, num_tokens)
    assert all(request.allocator.holders(page) == 1 for page in request.pages)


def test_page_table_rows():
    allocator = PageAllocator(8)
    requests = [RequestPages(allocator) for _ in range(3)]
    for request, tokens in zip(requests, (65, 0, 192), strict=True):
        request.extend(tokens)
    table = page_table(requests)
    assert table.dtype == torch.int32
    assert table.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert page_table([]).shape == (0, 0)


# --- stale reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_freed_pages_are_poisoned_and_others_are_not(layout):
    kv = PagedKV(2, 4, layout, index_layers=(1,), poison=True)
    kept, gone = kv.request(), kv.request()
    kept.extend(64)
    gone.extend(128)
    lost = gone.pages
    gone.close()
    page_of_slot = torch.arange(256) // 64
    stale = torch.isin(page_of_slot, torch.tensor(lost))
    for layer in range(2):
        key = kv.read(layer).key()
        assert key[stale].isnan().all() and not key[~stale].any()
    index_key = kv.read(1).index_key()
    assert index_key[stale].isnan().all() and not index_key[~stale].any()


def test_without_poison_freed_pages_keep_their_bytes():
    kv = PagedKV(1, 3)
    with kv.request() as request:
        request.extend(1)
        kv.latent_pool.fill_(1)
    assert (kv.latent_pool == 1).all()


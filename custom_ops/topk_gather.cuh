// Of a row as it streams by, what reaches a threshold: appended to the items in shared memory.

#include "topk_select.cuh"

constexpr unsigned NAN_BITS = 0x7fffffffu;

struct Row {
    const float* first;  // its element 0
    int length;
    int lead;     // elements between the 16-byte boundary before it and element 0
    int quads;    // of 16 bytes that hold any of it
};

__device__ __forceinline__ Row row_at(const float* first, int length) {
    const int lead = (int)(reinterpret_cast<unsigned long long>(first) >> 2 & 3);
    return Row{first, length, lead, (lead + length + 3) / 4};
}

// A quad that only partly belongs to the row.
__device__ __forceinline__ float4 load_part(const float* first, int at, int length) {
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        v[c] = (unsigned)(at + c) < (unsigned)length ? first[at + c] : __uint_as_float(NAN_BITS);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Reads nothing outside the row; what is outside is NaN.
__device__ __forceinline__ float4 load(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return load_quad(row.first + at);
    const float nan = __uint_as_float(NAN_BITS);
    return at < row.length ? load_part(row.first, at, row.length) : float4{nan, nan, nan, nan};
}

// Whether the N tiles from quad ``from`` on, ``stride`` quads apart, lie in the row.
template <int N>
__device__ __forceinline__ bool whole_tiles(const Row& row, int from, int stride) {
    return 4 * from >= row.lead && 4 * (from + (N - 1) * stride + THREADS) - row.lead <= row.length;
}

// This thread's quads of N tiles.
template <int N>
__device__ __forceinline__ void load_tiles(const Row& row, int from, int stride, float4 (&v)[N]) {
    const int quad = from + threadIdx.x;
    if (whole_tiles<N>(row, from, stride)) {
        const float* at = row.first + (4 * quad - row.lead);
#pragma unroll
        for (int u = 0; u < N; ++u) v[u] = load_quad(at + 4 * u * stride);
    } else {
#pragma unroll
        for (int u = 0; u < N; ++u) v[u] = load(row, quad + u * stride);
    }
}

// Makes NaN of what lies behind the row in tiles that were loaded as of a longer one.
template <int N>
__device__ __forceinline__ void drop_behind(const Row& row, int from, int stride, float4 (&v)[N]) {
    if (whole_tiles<N>(row, from, stride)) return;
    const int left = row.length + row.lead - 4 * (from + (int)threadIdx.x);
    const float nan = __uint_as_float(NAN_BITS);
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (left <= 4 * u * stride + 0) v[u].x = nan;
        if (left <= 4 * u * stride + 1) v[u].y = nan;
        if (left <= 4 * u * stride + 2) v[u].z = nan;
        if (left <= 4 * u * stride + 3) v[u].w = nan;
    }
}

// Which of the quads' elements are above ``below``: a bit each, the first element's the highest. The sign of a difference,
// as a comparison would take a predicate. NaN is not above; +0 and -0 are equal.
template <int N>
__device__ __forceinline__ unsigned elements_above(const float4 (&v)[N], float below) {
    unsigned mask = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        mask = __funnelshift_l(difference(below, v[u].x), mask, 1);
        mask = __funnelshift_l(difference(below, v[u].y), mask, 1);
        mask = __funnelshift_l(difference(below, v[u].z), mask, 1);
        mask = __funnelshift_l(difference(below, v[u].w), mask, 1);
    }
    return mask;
}

// The same of those that passes(i, x) holds for, i counted through them.
template <int N, class Passes>
__device__ __forceinline__ unsigned elements_that(const float4 (&v)[N], const Passes& passes) {
    unsigned mask = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        mask = 2 * mask + passes(4 * u + 0, v[u].x);
        mask = 2 * mask + passes(4 * u + 1, v[u].y);
        mask = 2 * mask + passes(4 * u + 2, v[u].z);
        mask = 2 * mask + passes(4 * u + 3, v[u].w);
    }
    return mask;
}

// Appends to the items those of the quads' elements that ``mask`` names; ``position`` is that of the first, a quad
// follows ``stride`` quads behind the other. What does not fit is counted and not stored. NUMBERS: none is NaN. REMOTE:
// to the first block of the cluster.
template <int N, bool NUMBERS, bool REMOTE>
__device__ __forceinline__ void append(Shared& s, const float4 (&v)[N], unsigned mask, int position, int stride) {
    static_assert(N <= 8, "a bit of the mask each");
    const unsigned mine = __popc(mask), inclusive = warp_inclusive_sum(mine);
    unsigned start = 0;
    if (lane() == 31 && inclusive) {
        // Were the address one that all lanes have, the compiler would add up what the lanes bring first.
        start = REMOTE ? leader_add(&s.gathered, inclusive) : shared_add(&s.gathered + (31 - lane()), inclusive);
    }
    const unsigned index = __shfl_sync(ALL, start, 31) + inclusive - mine;
    if (index + mine > CAPACITY) return;
    uint2* item = s.items + index;
    auto put = [&](int i, float x) {
        if (mask >> (4 * N - 1 - i) & 1) {
            const uint2 value = make_uint2(NUMBERS ? item_of_number(x) : item_of(x), position + 4 * (i / 4) * stride + i % 4);
            if (REMOTE) leader_store(item, value);
            else *item = value;
            ++item;
        }
    };
#pragma unroll
    for (int u = 0; u < N; ++u) {
        put(4 * u + 0, v[u].x);
        put(4 * u + 1, v[u].y);
        put(4 * u + 2, v[u].z);
        put(4 * u + 3, v[u].w);
    }
}

// Gathers what is above ``below``. Returns how many, or more than fit. Not inlined: few rows need it.
__device__ __noinline__ int stream(Shared& s, Row row, float below) {
    constexpr int N = 4;
    __syncthreads();
    if (threadIdx.x == 0) s.gathered = 0;
    __syncthreads();
    for (int from = 0; from < row.quads; from += N * THREADS) {
        float4 v[N];
        load_tiles(row, from, THREADS, v);
        append<N, true, false>(s, v, elements_above(v, below), 4 * (from + (int)threadIdx.x) - row.lead, THREADS);
    }
    __syncthreads();
    return s.gathered;
}

// Calls f(key, position) for this thread's of the items.
template <class F>
__device__ __forceinline__ void each_item(const Shared& s, int count, const F& f) {
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint2 item = s.items[i];
        f(key_of(item.x), item.y);
    }
}

// Of the items of one key, as many as are needed, those in front. Not inlined: few rows need it.
template <bool STOP_AT_FEW>
__device__ __noinline__ Range range_by_position(Shared& s, int count, int length, Range r) {
    r.by_position = true;
    r.key = r.low;
    r.width = length - 1;
    r.low = ~r.width;
    narrow<STOP_AT_FEW, true>(s, r, max(0, WHOLE_SHIFT - __clz(r.width)), 0, [&](auto f) { each_item(s, count, f); });
    return r;
}

template <bool STOP_AT_FEW>
__device__ __forceinline__ Range range_of_items(Shared& s, int count, int k, int length, unsigned low, int shift) {
    const Range r = find_range<STOP_AT_FEW>(s, k, Search{low, shift, 0}, [&](auto f) { each_item(s, count, f); });
    if (!r.tied || (STOP_AT_FEW && r.inside <= FEW)) return r;
    return range_by_position<STOP_AT_FEW>(s, count, length, r);
}

// Leaves the best k of items[0, count) in front, in any order. The key of the last of them.
__device__ __noinline__ unsigned prune(Shared& s, int count, int k, int length) {
    const Cut cut = range_of_items<false>(s, count, k, length, 0, WHOLE_SHIFT).cut();
    if (threadIdx.x == 0) s.stayed = 0;
    for (int at = 0; at < count; at += THREADS) {
        const int i = at + threadIdx.x;
        const uint2 item = i < count ? s.items[i] : make_uint2(0, 0);
        const bool stays = i < count && selected(key_of(item.x), item.y, cut);
        __syncthreads();  // all is read that is overwritten now
        const unsigned index = claim(&s.stayed, stays);
        if (stays) s.items[index] = item;
    }
    __syncthreads();
    return cut.key;
}

// Gathers the elements of keys from ``least`` on, or, as what is gathered is cut back when it is full, at least the best
// k of them if there are so many. Returns how many. Not inlined: few rows need it.
__device__ __noinline__ int gather(Shared& s, Row row, int k, unsigned least) {
    int kept = 0;
    bool strict = false;
    __syncthreads();
    if (threadIdx.x == 0) s.gathered = 0;
    __syncthreads();
    for (int from = 0; from < row.quads; from += THREADS) {
        if (kept + TILE > CAPACITY) {
            least = prune(s, kept, k, row.length) + 1;
            strict = true;
            if (threadIdx.x == 0) s.gathered = k;
            __syncthreads();
        }
        float4 v[1];
        load_tiles(row, from, THREADS, v);
        const int position = 4 * (from + (int)threadIdx.x) - row.lead;
        const unsigned mask = elements_that(v, [&](int i, float x) {
            return order_key(__float_as_uint(x)) >= least && (unsigned)(position + i) < (unsigned)row.length;
        });
        append<1, false, false>(s, v, mask, position, THREADS);
        __syncthreads();
        kept = s.gathered;
        __syncthreads();
        // Elements come in order: of those equal to the k-th best so far, the ones behind lose.
        if (!strict && kept >= k) {
            ++least;
            strict = true;
        }
    }
    return kept;
}

// Appends, to fewer than k items above the threshold, as many of the first elements equal to it as make k, and some
// more. Returns how many items there are.
__device__ __noinline__ int gather_ties(Shared& s, Row row, int k, float tied) {
    int kept = s.gathered;
    for (int from = 0; from < row.quads && kept < k; from += THREADS) {
        float4 v[1];
        load_tiles(row, from, THREADS, v);
        __syncthreads();
        const int position = 4 * (from + (int)threadIdx.x) - row.lead;
        append<1, true, false>(s, v, elements_that(v, [&](int, float x) { return x == tied; }), position, THREADS);
        __syncthreads();
        kept = s.gathered;
    }
    return kept;
}

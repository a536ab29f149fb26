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

// Appends to the items what passes(i, x) of the quads' elements, i counted through them; ``position`` is that of the
// first, a quad follows ``stride`` quads behind the other. What does not fit is counted and not stored. REMOTE: to the
// first block of the cluster.
template <int N, bool REMOTE, class Passes>
__device__ __forceinline__ void append(Shared& s, const float4 (&v)[N], int position, int stride, const Passes& passes) {
    unsigned mine = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        mine += passes(4 * u + 0, v[u].x);
        mine += passes(4 * u + 1, v[u].y);
        mine += passes(4 * u + 2, v[u].z);
        mine += passes(4 * u + 3, v[u].w);
    }
    const unsigned inclusive = warp_inclusive_sum(mine);
    unsigned start = 0;
    if (lane() == 31 && inclusive) {
        start = REMOTE ? leader_add(&s.gathered, inclusive) : atomicAdd(&s.gathered, inclusive);
    }
    const unsigned index = __shfl_sync(ALL, start, 31) + inclusive - mine;
    if (index + mine > CAPACITY) return;
    uint2* item = s.items + index;
    auto put = [&](int i, float x) {
        if (passes(i, x)) {
            const uint2 value = make_uint2(__float_as_uint(x), position + 4 * (i / 4) * stride + i % 4);
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

template <bool STOP_AT_FEW>
__device__ __forceinline__ Range range_of_items(Shared& s, int count, int k, int length, unsigned low, int shift) {
    return find_range<STOP_AT_FEW>(s, k, length, Search{low, shift, 0, true}, [&](auto f) {
#pragma unroll 2
        for (int i = threadIdx.x; i < count; i += THREADS) f(order_key(s.items[i].x), s.items[i].y);
    });
}

// Leaves the best k of items[0, count) in front, in any order. The key of the last of them.
__device__ __noinline__ unsigned prune(Shared& s, int count, int k, int length) {
    const Cut cut = range_of_items<false>(s, count, k, length, 0, WHOLE_SHIFT).cut();
    if (threadIdx.x == 0) s.stayed = 0;
    for (int at = 0; at < count; at += THREADS) {
        const int i = at + threadIdx.x;
        const uint2 item = i < count ? s.items[i] : make_uint2(0, 0);
        const bool stays = i < count && selected(order_key(item.x), item.y, cut);
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
        append<1, false>(s, v, position, THREADS, [&](int i, float x) {
            return order_key(__float_as_uint(x)) >= least && (unsigned)(position + i) < (unsigned)row.length;
        });
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
__device__ __noinline__ int gather_ties(Shared& s, Row row, int k, float threshold) {
    int kept = s.gathered;
    for (int from = 0; from < row.quads && kept < k; from += THREADS) {
        float4 v[1];
        load_tiles(row, from, THREADS, v);
        __syncthreads();
        const int position = 4 * (from + (int)threadIdx.x) - row.lead;
        append<1, false>(s, v, position, THREADS, [&](int, float x) { return x == threshold; });
        __syncthreads();
        kept = s.gathered;
    }
    return kept;
}

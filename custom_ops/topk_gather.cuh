// Of a row as it streams by, what reaches a threshold: appended to the items in shared memory.

#include "topk_select.cuh"

struct Row {
    const float* first;  // its element 0
    int length;
    int lead;     // elements between the 16-byte boundary before it and element 0
    int quads;    // of 16 bytes that hold any of it
};

// Which of the four elements belong to the row.
__device__ __forceinline__ unsigned inside(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return 15;
    unsigned mask = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) mask |= (unsigned)((unsigned)(at + c) < (unsigned)row.length) << c;
    return mask;
}

// A quad that only partly belongs to the row. Not inlined: the code of a load that is all but never needed.
__device__ __noinline__ float4 load_part(const float* first, int at, int length) {
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        v[c] = (unsigned)(at + c) < (unsigned)length ? first[at + c] : __uint_as_float(0x7fffffffu);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Reads nothing outside the row; what is outside is NaN.
__device__ __forceinline__ float4 load(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return load_quad(row.first + at);
    return load_part(row.first, at, row.length);
}

// Loads N quads from ``quad``, THREADS apart; the tile ``from`` is the block's first. Which elements are of the row.
template <int N>
__device__ __forceinline__ unsigned load_tiles(const Row& row, int from, float4 (&v)[N]) {
    const int quad = from + threadIdx.x;
    if (4 * from >= row.lead && 4 * (from + N * THREADS) - row.lead <= row.length) {
        const float* at = row.first + (4 * quad - row.lead);
#pragma unroll
        for (int u = 0; u < N; ++u) v[u] = load_quad(at + u * TILE);
        return ALL >> (32 - 4 * N);
    }
    unsigned valid = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) v[u] = load(row, quad + u * THREADS);
#pragma unroll 1
    for (int u = 0; u < N; ++u) valid |= inside(row, quad + u * THREADS) << (4 * u);
    return valid;
}

struct Filter {
    float threshold;
    bool all;  // NaN too
};

// Lets through what is above all that ``filter`` does not, and above the least that it does.
__device__ __forceinline__ Filter strictly(Filter filter) {
    const unsigned least = filter.all ? 0 : order_key(__float_as_uint(filter.threshold));
    return Filter{float_from(least + 1), false};
}

// Appends what passes of the quads to the items from ``base``. What does not fit is counted and not stored. REMOTE: to
// the first block of the cluster.
template <int N, bool REMOTE>
__device__ __forceinline__ void append(Shared& s, unsigned* counter, unsigned base, const float4 (&v)[N], unsigned valid,
                                       int position, Filter filter) {
    unsigned passing = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (v[u].x >= filter.threshold) passing |= 1u << (4 * u);
        if (v[u].y >= filter.threshold) passing |= 2u << (4 * u);
        if (v[u].z >= filter.threshold) passing |= 4u << (4 * u);
        if (v[u].w >= filter.threshold) passing |= 8u << (4 * u);
    }
    passing = (filter.all ? ALL : passing) & valid;
    const unsigned mine = __popc(passing);
    const unsigned inclusive = warp_inclusive_sum(mine);
    unsigned start = 0;
    if (lane() == 31 && inclusive) start = REMOTE ? leader_add(counter, inclusive) : atomicAdd(counter, inclusive);
    const unsigned index = base + __shfl_sync(ALL, start, 31) + inclusive - mine;
    if (index + mine > CAPACITY) return;
    uint2* item = s.items + index;
    auto put = [&](int bit, float x) {
        if (passing >> bit & 1) {
            const uint2 value = make_uint2(__float_as_uint(x), position + bit / 4 * TILE + bit % 4);
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

__device__ __forceinline__ Cut cut_of_items(Shared& s, int count, int k, int length, unsigned low, int shift) {
    Search search{low, shift, 0, true};
    return find_cut<true>(s, k, length, search, [&](auto f) {
        for (int i = threadIdx.x; i < count; i += THREADS) f(order_key(s.items[i].x), s.items[i].y);
    });
}

// Leaves the best k of items[0, count) in front, in any order. The key of the last of them.
__device__ __noinline__ unsigned prune(Shared& s, int count, int k, int length) {
    const Cut cut = cut_of_items(s, count, k, length, 0, WHOLE_SHIFT);
    auto stays = [&](int i) { return selected(order_key(s.items[i].x), s.items[i].y, cut); };
    if (threadIdx.x == 0) s.holes = s.movers = 0;
    __syncthreads();
    for (int at = 0; at < k; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool hole = i < k && !stays(i);
        const unsigned index = claim(&s.holes, hole);
        if (hole) s.stage[index] = i;
    }
    __syncthreads();
    for (int at = k; at < count; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool moves = i < count && stays(i);
        const unsigned index = claim(&s.movers, moves);
        if (moves) s.items[s.stage[index]] = s.items[i];
    }
    __syncthreads();
    return cut.key;
}

// Gathers every element that passes, and at least the best k of the row if so many pass. Returns how many.
template <int N>
__device__ __forceinline__ int gather(Shared& s, const Row& row, int k, Filter filter, bool careful) {
    int kept = 0, slot = 0;
    int singles = careful ? N : 0;  // tiles to take one by one, as all at once might not fit
    bool strict = false;
    __syncthreads();
    if (threadIdx.x < 3) s.gathered[threadIdx.x] = 0;
    __syncthreads();
    // Counters take turns: one is zeroed two barriers before it is used again.
    auto close = [&]() {
        __syncthreads();
        const int count = s.gathered[slot];
        const int next = slot == 2 ? 0 : slot + 1;
        if (threadIdx.x == 0) s.gathered[3 - slot - next] = 0;
        slot = next;
        return count;
    };
    for (int from = 0; from < row.quads;) {
        const int position = 4 * (from + (int)threadIdx.x) - row.lead;
        if (singles == 0) {
            float4 v[N];
            const unsigned valid = load_tiles(row, from, v);
            append<N, false>(s, &s.gathered[slot], kept, v, valid, position, filter);
            const int count = close();
            if (kept + count > CAPACITY) {
                singles = N;
            } else {
                kept += count;
                from += N * THREADS;
            }
        } else {
            if (kept + TILE > CAPACITY) {
                filter = Filter{float_from(prune(s, kept, k, row.length) + 1), false};
                strict = true;
                kept = k;
            }
            float4 v[1];
            const unsigned valid = load_tiles(row, from, v);
            append<1, false>(s, &s.gathered[slot], kept, v, valid, position, filter);
            kept += close();
            from += THREADS;
            --singles;
        }
        // Elements come in order: of those equal to the k-th best so far, the ones behind lose.
        if (!strict && kept >= k) {
            filter = strictly(filter);
            strict = true;
            singles = 0;
        }
    }
    return kept;
}

// For the first block of a cluster, behind ``kept`` items above the threshold: as many of the first elements equal to
// it as make k, and some more.
__device__ __forceinline__ int gather_ties(Shared& s, const Row& row, int k, float threshold, int kept) {
    for (int from = 0; from < row.quads && kept < k; from += THREADS) {
        __syncthreads();
        if (threadIdx.x == 0) s.gathered[1] = 0;
        __syncthreads();
        float4 v[1];
        unsigned valid = load_tiles(row, from, v);
        valid &= (unsigned)(v[0].x == threshold) | (unsigned)(v[0].y == threshold) << 1 |
                 (unsigned)(v[0].z == threshold) << 2 | (unsigned)(v[0].w == threshold) << 3;
        append<1, false>(s, &s.gathered[1], kept, v, valid, 4 * (from + (int)threadIdx.x) - row.lead, Filter{0, true});
        __syncthreads();
        kept += s.gathered[1];
    }
    return kept;
}

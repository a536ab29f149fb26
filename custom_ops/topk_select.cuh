// What topk.cu is made of: the device's instructions, keys that sort as the selection does, and the cut of the best k.

#include "machine.cuh"

#ifndef CUDA_HOST

extern __shared__ __align__(16) unsigned char dynamic_shared[];

__device__ __forceinline__ float4 load_quad(const float* at) {
    float4 v;  // every element is read once: not worth a line of L1
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

// Of the threads of the warp up to this one. The compiler takes twice the instructions.
__device__ __forceinline__ unsigned warp_inclusive_sum(unsigned mine) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        asm volatile("{ .reg .pred has;\n\t"
                     ".reg .u32 other;\n\t"
                     "shfl.sync.up.b32 other|has, %0, %1, 0, 0xffffffff;\n\t"
                     "@has add.u32 %0, %0, other; }" : "+r"(mine) : "r"(d));
    }
    return mine;
}

__device__ __forceinline__ unsigned shared_add(unsigned* at, unsigned amount) {
    unsigned before;
    asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(amount) : "memory");
    return before;
}

// Bits of a - b, of which NaN has no sign.
__device__ __forceinline__ unsigned difference(float a, float b) { return __float_as_uint(a - b); }

// Where the object at ``mine`` lies in the shared memory of the cluster's first block.
__device__ __forceinline__ unsigned leaders(const void* mine) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(mine)));
    return there;
}

__device__ __forceinline__ unsigned leader_add(unsigned* mine, unsigned amount) {
    unsigned before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"(leaders(mine)), "r"(amount) : "memory");
    return before;
}

__device__ __forceinline__ void leader_store(uint2* mine, uint2 value) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(leaders(mine)), "r"(value.x), "r"(value.y) : "memory");
}

#endif  // CUDA_HOST

constexpr unsigned ALL = 0xffffffffu;
constexpr int LAST = 0x7fffffff;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 4 * THREADS;  // elements: one load a thread
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }
constexpr int LOG_THREADS = log2_of(THREADS);
constexpr int BINS = 1 << LOG_BINS;
constexpr int FEW = 32;
constexpr unsigned MINUS_INFINITY = 0x007fffffu;  // the least key that is not of a NaN
constexpr int WHOLE_SHIFT = 32 - LOG_BINS;        // of bins over all keys
static_assert(1 << LOG_THREADS == THREADS && THREADS >= 64 && THREADS <= 1024, "");
static_assert(LOG_BINS >= 9 && BINS >= THREADS, "+inf's key and a bin's keys are below 2^32; a bin or more a thread");
static_assert(CAPACITY >= MAX_K + TILE, "a tile must fit behind the best k");
static_assert(CAPACITY % 2 == 0 && MAX_K % 4 == 0, "what follows is aligned to 16 bytes");

struct Shared {
    union {
        uint2 items[CAPACITY];  // gathered: item_of a logit, its position
        unsigned stage[MAX_K];  // what is selected, once the bitmap has taken the items' place
    };
    unsigned bins[BINS];  // the histogram of a search, which leaves it zero; then the bitmap
    uint2 few[FEW];
    unsigned warp_sum[32];
    unsigned warp_high[32];
    unsigned gathered;  // how many items, or more than fit
    unsigned found[3];  // bin, how many above it, how many in it
    unsigned few_count;
    unsigned stayed;
};

// What is selected: keys above ``key``, and at ``key`` positions up to ``position``.
struct Cut {
    unsigned key;
    int position;
};

// NaN lowest, -0 equal to +0.
__device__ __forceinline__ unsigned order_key(unsigned bits) {
    const float x = __uint_as_float(bits) + 0.0f;  // -0 becomes +0
    bits = __float_as_uint(x);
    return x == x ? bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u) : 0;
}

// What is gathered of a logit, and its key: a few instructions fewer than ``order_key``.
__device__ __forceinline__ unsigned item_of_number(float x) { return __float_as_uint(x + 0.0f); }
__device__ __forceinline__ unsigned item_of(float x) { return x == x ? item_of_number(x) : ALL; }
__device__ __forceinline__ unsigned key_of(unsigned item) { return item ^ ((unsigned)((int)item >> 31) | 0x80000000u); }

// The float of a key from MINUS_INFINITY on; above +inf a NaN, which is equal to nothing.
__device__ __forceinline__ float float_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The greatest float below what has ``key``, of +0 the greatest below -0; of MINUS_INFINITY a NaN, as none is.
__device__ __forceinline__ float float_below(unsigned key) { return float_of(key - 1 - (key == 0x80000000u)); }

__device__ __forceinline__ bool selected(unsigned key, unsigned position, Cut cut) {
    return key > cut.key || (key == cut.key && position <= (unsigned)cut.position);
}

__device__ __forceinline__ int lane() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp() { return threadIdx.x >> 5; }

// Of the threads before this one; one barrier inside, and another before the next call.
__device__ __forceinline__ unsigned exclusive_sum(Shared& s, unsigned mine, unsigned& total) {
    const unsigned inclusive = warp_inclusive_sum(mine);
    if (lane() == 31) s.warp_sum[warp()] = inclusive;
    __syncthreads();
    const unsigned sum = lane() < WARPS ? s.warp_sum[lane()] : 0;
    total = __reduce_add_sync(ALL, sum);
    return __reduce_add_sync(ALL, lane() < warp() ? sum : 0) + inclusive - mine;
}

// The next index from ``counter`` for each thread of the warp that wants one.
__device__ __forceinline__ unsigned claim(unsigned* counter, bool wants) {
    const unsigned wanting = __ballot_sync(ALL, wants);
    unsigned base = 0;
    if (lane() == 0 && wanting) base = atomicAdd(counter, __popc(wanting));
    return __shfl_sync(ALL, base, 0) + __popc(wanting & ((1u << lane()) - 1));
}

__device__ __forceinline__ void clear_bins(Shared& s) {
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4*>(s.bins)[i] = make_uint4(0, 0, 0, 0);
}

// How a search goes about.
struct Search {
    unsigned low;  // a guess: no key of the k is below
    int shift;     // log2 of the keys a bin of the first histogram; too small costs time alone
    int slack;     // as many more than k may be selected
};

// Where a search ended: all above is selected, and of what is inside ``need``. By key, or among those of one key by
// ~position.
struct Range {
    unsigned low, width;
    unsigned need, inside;
    bool by_position;
    unsigned key;  // the one, where it is by position
    bool tied;     // more is inside than may be selected

    __device__ __forceinline__ Cut cut() const { return by_position ? Cut{key, (int)~low} : Cut{low, LAST}; }
};

// Narrows a range until it holds no more than may be selected, or one value. ``each(f)`` calls f(key, position) for the
// elements of this thread; there are ``need`` at least. The bins are zero before and after; a barrier lies before it,
// others inside, one after what it reads. STOP_AT_FEW: the caller ranks up to FEW that are left; else a first bin that
// holds much is searched for being of one key.
template <bool STOP_AT_FEW, bool BY_POSITION, class Each>
__device__ __forceinline__ void narrow(Shared& s, Range& r, int shift, int slack, const Each& each) {
    bool first = true;
    for (;;) {
        // Bin 0 holds the lowest value alone: a threshold that many elements are equal to is found at once.
        const unsigned round = (1u << shift) - 1;
        each([&](unsigned key, unsigned position) {
            if (BY_POSITION && key != r.key) return;
            const unsigned offset = (BY_POSITION ? ~position : key) - r.low;
            if (offset <= r.width) atomicAdd(&s.bins[min((offset + round) >> shift, BINS - 1u)], 1);
        });
        __syncthreads();
        constexpr int MINE = BINS / THREADS;
        unsigned counts[MINE], sum = 0, total;
#pragma unroll
        for (int j = 0; j < MINE; ++j) sum += counts[j] = s.bins[threadIdx.x * MINE + j];
#pragma unroll
        for (int j = 0; j < MINE; ++j) s.bins[threadIdx.x * MINE + j] = 0;
        const unsigned before = exclusive_sum(s, sum, total);
        if (total < r.need) {  // a wrong guess
            r.low = 0;
            r.width = ALL;
            shift = WHOLE_SHIFT;
            continue;
        }
        unsigned above = total - before - sum;
        if (above < r.need && r.need <= above + sum) {
#pragma unroll
            for (int j = MINE - 1; j >= 0; --j) {
                if (above < r.need && r.need <= above + counts[j]) {
                    s.found[0] = threadIdx.x * MINE + j;
                    s.found[1] = above;
                    s.found[2] = counts[j];
                }
                above += counts[j];
            }
        }
        __syncthreads();
        const unsigned bin = s.found[0];
        const unsigned skipped = bin ? ((bin - 1) << shift) + 1 : 0;
        r.inside = s.found[2];
        r.need -= s.found[1];
        r.low += skipped;
        r.width = bin == 0 ? 0 : bin == BINS - 1 ? r.width - skipped : min(r.width - skipped, round);
        r.tied = r.inside - r.need > (unsigned)slack;
        if (!STOP_AT_FEW && !BY_POSITION && first && r.tied && r.width && r.inside > total / 4) {
            unsigned least = ALL, most = 0;
            each([&](unsigned key, unsigned) {
                const unsigned offset = key - r.low;
                if (offset <= r.width) {
                    least = min(least, offset);
                    most = max(most, offset);
                }
            });
            least = __reduce_min_sync(ALL, least);
            most = __reduce_max_sync(ALL, most);
            if (lane() == 0) {
                s.warp_sum[warp()] = least;
                s.warp_high[warp()] = most;
            }
            __syncthreads();
            least = __reduce_min_sync(ALL, lane() < WARPS ? s.warp_sum[lane()] : ALL);
            r.low += least;
            r.width = __reduce_max_sync(ALL, lane() < WARPS ? s.warp_high[lane()] : 0) - least;
        }
        first = false;
        if (!r.tied || r.width == 0 || (STOP_AT_FEW && r.inside <= FEW)) return;
        shift = max(0, WHOLE_SHIFT - __clz(r.width));
    }
}

// The range that the last of the k best lies in; equal keys are not told apart.
template <bool STOP_AT_FEW, class Each>
__device__ __forceinline__ Range find_range(Shared& s, int k, const Search& search, const Each& each) {
    Range r{search.low, ~search.low, (unsigned)k, 0, false, 0, false};
    narrow<STOP_AT_FEW, false>(s, r, search.shift, search.slack, each);
    return r;
}

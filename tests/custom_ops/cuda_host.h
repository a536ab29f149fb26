// Enough of CUDA to run a kernel on the host: a cluster's threads are fibers, and each gives way at every barrier and
// warp collective. Their order is drawn anew each time, so that a missing barrier shows. Included before the kernel.

#pragma once
#define CUDA_HOST

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace host {

constexpr int STACK = 64 << 10;
constexpr int BEHIND = 64 << 10;  // bytes behind a block's shared memory, which nothing may write
constexpr unsigned char UNTOUCHED = 0xff;  // NaN, of any format

struct Rendezvous {
    int arrived = 0, generation = 0;
    unsigned values[2][32];
};

struct Block {
    Rendezvous barrier;
    std::vector<Rendezvous> warps;
    std::vector<unsigned char> shared;
};

struct Fiber {
    unsigned thread;
    Block* block;
    bool done = false, started = false;
    int arrived;  // at the cluster's rendezvous
    std::vector<char> stack;
    ucontext_t context;
    jmp_buf state;
};

inline jmp_buf scheduler;
inline Fiber* current;
inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline Rendezvous cluster;
inline unsigned block_index, grid_size, threads;
inline void (*body)();

inline void give_way() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

inline void start() {
    body();
    current->done = true;
    _longjmp(scheduler, 1);
}

// Returns what ``wait`` is to be told.
inline int arrive(Rendezvous& at, int expected, int index, unsigned value) {
    const int mine = at.generation;
    at.values[mine & 1][index & 31] = value;
    if (++at.arrived == expected) {
        at.arrived = 0;
        ++at.generation;
    }
    return mine;
}

// Waits until all that are expected have come; of what each brought, as it was then.
inline const unsigned* wait(const Rendezvous& at, int mine) {
    while (at.generation == mine) give_way();
    return at.values[mine & 1];
}

inline const unsigned* meet(Rendezvous& at, int expected, int index, unsigned value) {
    return wait(at, arrive(at, expected, index, value));
}

inline const unsigned* warp_meet(unsigned value) {
    return meet(current->block->warps[current->thread / 32], 32, current->thread % 32, value);
}

// Runs ``kernel`` on every thread of every block, a cluster at a time. False if one wrote behind its shared memory.
inline bool launch(unsigned grid, unsigned threads_of_block, unsigned cluster_blocks, size_t shared, unsigned seed,
                   void (*kernel)()) {
    std::mt19937 random(seed);
    bool inside = true;
    body = kernel;
    grid_size = grid;
    threads = threads_of_block;
    for (block_index = 0; block_index < grid; block_index += cluster_blocks) {
        blocks.assign(cluster_blocks, {});
        cluster = {};
        fibers.clear();
        fibers.resize(cluster_blocks * threads);
        for (auto& b : blocks) {
            b.warps.resize(threads / 32);
            b.shared.assign(shared + BEHIND, UNTOUCHED);
        }
        std::vector<Fiber*> live;
        for (size_t i = 0; i < fibers.size(); ++i) {
            fibers[i].thread = i % threads;
            fibers[i].block = &blocks[i / threads];
            fibers[i].stack.resize(STACK);
            live.push_back(&fibers[i]);
        }
        for (long idle = 0; !live.empty(); ++idle) {
            if (idle > 2000000) {
                fprintf(stderr, "deadlock: %zu threads wait\n", live.size());
                abort();
            }
            std::shuffle(live.begin(), live.end(), random);
            unsigned held[64];  // most warps sit out a round, so that they drift apart
            for (unsigned& draw : held) draw = random();
            for (Fiber* fiber : live) {
                const size_t warp = fiber->thread / 32 + (fiber->block - blocks.data()) * (threads / 32);
                if (held[warp % 64] % 4) continue;
                current = fiber;
                if (_setjmp(scheduler)) continue;
                if (fiber->started) _longjmp(fiber->state, 1);
                fiber->started = true;
                getcontext(&fiber->context);
                fiber->context.uc_stack.ss_sp = fiber->stack.data();
                fiber->context.uc_stack.ss_size = fiber->stack.size();
                makecontext(&fiber->context, start, 0);
                setcontext(&fiber->context);
            }
            live.erase(std::remove_if(live.begin(), live.end(), [](Fiber* f) { return f->done; }), live.end());
        }
        for (const auto& b : blocks) {
            for (size_t i = shared; i < b.shared.size(); ++i) inside &= b.shared[i] == UNTOUCHED;
        }
    }
    return inside;
}

}  // namespace host

#define threadIdx (Index{host::current->thread})
#define blockIdx (Index{host::block_index + (unsigned)(host::current->block - host::blocks.data())})
#define gridDim (Index{host::grid_size})
#define dynamic_shared (host::current->block->shared.data())

inline void __syncthreads() { host::meet(host::current->block->barrier, host::threads, 0, 0); }
inline unsigned __shfl_sync(unsigned, unsigned v, int from) { return host::warp_meet(v)[from]; }
inline unsigned __shfl_xor_sync(unsigned, unsigned v, int mask) {
    return host::warp_meet(v)[host::current->thread % 32 ^ mask];
}
inline unsigned __ballot_sync(unsigned, bool p) {
    const unsigned* all = host::warp_meet(p);
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= all[i] << i;
    return mask;
}
inline unsigned __reduce_add_sync(unsigned, unsigned v) {
    const unsigned* all = host::warp_meet(v);
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum;
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
    const unsigned* all = host::warp_meet(v);
    return *std::min_element(all, all + 32);
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    const unsigned* all = host::warp_meet(v);
    return *std::max_element(all, all + 32);
}

template <class T>
T atomicAdd(T* at, T by) {
    const T before = *at;
    *at += by;
    return before;
}
inline unsigned atomicAdd(unsigned* at, int by) { return atomicAdd(at, (unsigned)by); }
inline unsigned atomicOr(unsigned* at, unsigned by) {
    const unsigned before = *at;
    *at |= by;
    return before;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return ((unsigned long long)high << 32 | low) << (by & 31) >> 32;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline void __syncwarp() { host::warp_meet(0); }

// bfloat16, two in a word.
inline unsigned bfloat16(float x) {
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
inline unsigned narrowed(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
inline float2 widened(unsigned pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}; }

inline unsigned cluster_rank() { return host::current->block - host::blocks.data(); }
inline unsigned cluster_size() { return host::blocks.size(); }
inline void cluster_arrive() {
    host::current->arrived = host::arrive(host::cluster, host::blocks.size() * host::threads, 0, 0);
}
inline void cluster_wait() { host::wait(host::cluster, host::current->arrived); }
template <class T>
T* leaders(T* mine) {
    return (T*)(host::blocks[0].shared.data() + ((unsigned char*)mine - host::current->block->shared.data()));
}
inline unsigned leader_add(unsigned* mine, unsigned by) { return atomicAdd(leaders(mine), by); }
inline void leader_store(uint2* mine, uint2 value) { *leaders(mine) = value; }

inline unsigned shared_add(unsigned* at, unsigned by) { return atomicAdd(at, by); }
inline unsigned difference(float a, float b) { return a - b == a - b ? __float_as_uint(a - b) : 0x7fffffffu; }
inline unsigned warp_inclusive_sum(unsigned mine) {
    const unsigned* all = host::warp_meet(mine);
    for (int lane = host::current->thread % 32; lane > 0;) mine += all[--lane];
    return mine;
}

inline float4 load_quad(const float* at) {
    if (reinterpret_cast<unsigned long long>(at) % 16) {
        fprintf(stderr, "unaligned load\n");
        abort();
    }
    return {at[0], at[1], at[2], at[3]};
}

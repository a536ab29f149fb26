// sparse_mla.cu as a function of the host; built by test_sparse_mla_cuda.py with the macros of a Tuning.
#include "tests/custom_ops/cuda_host.h"

#include <array>
#include <deque>
#include <map>

inline float power_of_two(float x) { return std::exp2(x); }

inline float half_of(unsigned pair, int which) { return which ? widened(pair).y : widened(pair).x; }

inline float e4m3(unsigned code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if ((code & 127) == 127) x = NAN;
    return code & 128 ? -x : x;
}
inline float2 widened_e4m3(unsigned codes) { return {e4m3(codes & 255), e4m3(codes >> 8 & 255)}; }

// What every lane of the warp holds, where all have come and none goes on before ``use`` is done with it.
template <class T, class Use>
void with_warp(const T& mine, Use use) {
    const auto address = reinterpret_cast<unsigned long long>(&mine);
    std::array<const T*, 32> lanes;
    std::array<unsigned, 32> low, high;
    std::copy_n(host::warp_meet(address), 32, low.begin());
    std::copy_n(host::warp_meet(address >> 32), 32, high.begin());
    for (int i = 0; i < 32; ++i) lanes[i] = reinterpret_cast<const T*>((unsigned long long)high[i] << 32 | low[i]);
    use(lanes);
    host::warp_meet(0);
}

// Copies of a thread, in groups.
struct Piece { void* target; const void* source; bool there; };
static std::map<host::Fiber*, std::deque<std::vector<Piece>>> groups;

inline void copy_async(void* target, const void* source, bool there) {
    if ((reinterpret_cast<unsigned long long>(target) | reinterpret_cast<unsigned long long>(source)) % 16) abort();
    auto& mine = groups[host::current];
    if (mine.empty()) mine.emplace_back();
    mine.back().push_back({target, source, there});
}
inline void close_copies() {
    auto& mine = groups[host::current];
    if (mine.empty()) mine.emplace_back();
    mine.emplace_back();
}
template <int N>
void await_copies() {
    auto& mine = groups[host::current];
    for (; mine.size() > N + 1; mine.pop_front()) {
        for (const Piece& piece : mine.front()) {
            if (piece.there) memcpy(piece.target, piece.source, 16);
            else memset(piece.target, 0, 16);
        }
    }
}

// Copies are made when a thread waits for them, not before: what is read too early is what was there.
struct Copy { void* target; const void* source; int bytes; };
struct Barrier {
    int arrivals, arrived = 0, announced = 0, parity = 0;
    std::vector<Copy> copies;
};
static std::map<void*, Barrier> barriers;

inline void set_up(unsigned long long* barrier, int arrivals) { barriers[barrier] = {arrivals}; }
inline void announce(unsigned long long* barrier, int bytes) {
    ++barriers.at(barrier).arrived;
    barriers.at(barrier).announced += bytes;
}
inline void copy_bulk(void* target, const void* source, int bytes, unsigned long long* barrier) {
    if ((reinterpret_cast<unsigned long long>(target) | reinterpret_cast<unsigned long long>(source) | bytes) % 16) abort();
    barriers.at(barrier).copies.push_back({target, source, bytes});
}
inline void await(unsigned long long* barrier, int parity) {
    Barrier& b = barriers.at(barrier);
    while (b.parity == parity) {
        int bytes = 0;
        for (const Copy& copy : b.copies) bytes += copy.bytes;
        if (b.arrived == b.arrivals && bytes == b.announced) {
            for (const Copy& copy : b.copies) memcpy(copy.target, copy.source, copy.bytes);
            b = {b.arrivals, 0, 0, !b.parity};
        } else {
            host::give_way();
        }
    }
}
inline void order_before_copies() {}

inline void load_tiles(unsigned (&a)[4], const void* row) {
    const int lane = host::current->thread % 32;
    with_warp(row, [&](const auto& rows) {
        for (int i = 0; i < 4; ++i) memcpy(&a[i], (const char*)*rows[8 * i + lane / 4] + lane % 4 * 4, 4);
    });
}
inline void load_transposed(unsigned (&a)[4], const void* row) {
    const int lane = host::current->thread % 32;
    with_warp(row, [&](const auto& rows) {
        for (int i = 0; i < 4; ++i) {
            unsigned short two[2];
            for (int j = 0; j < 2; ++j) memcpy(&two[j], (const char*)*rows[8 * i + lane % 4 * 2 + j] + lane / 4 * 2, 2);
            a[i] = two[0] | two[1] << 16;
        }
    });
}

struct Operands { unsigned a[4], b[2]; };
inline void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const int lane = host::current->thread % 32;
    const Operands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    with_warp(mine, [&](const auto& lanes) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = c[i];
            for (int k = 0; k < 16; ++k) {
                const unsigned left = lanes[row % 8 * 4 + k % 8 / 2]->a[row / 8 + k / 8 * 2];
                const unsigned right = lanes[column * 4 + k % 8 / 2]->b[k / 8];
                sum += half_of(left, k % 2) * half_of(right, k % 2);
            }
            c[i] = sum;
        }
    });
}

inline void cluster_barrier() { host::meet(host::cluster, host::blocks.size() * host::threads, 0, 0); }
inline float load_of(unsigned rank, const float* mine) {
    return *(const float*)(host::blocks[rank].shared.data() +
                           ((const unsigned char*)mine - host::current->block->shared.data()));
}

#include "custom_ops/sparse_mla.cu"

static Arguments arguments;

extern "C" int shared_bytes() { return sizeof(Shared); }

extern "C" bool sparse_mla_on_host(const Arguments* a, unsigned rows, unsigned blocks_of_a_row, unsigned seed) {
    arguments = *a;
    barriers.clear();
    groups.clear();
    return host::launch(rows * blocks_of_a_row, THREADS, blocks_of_a_row, shared_bytes(), seed,
                        [] { sparse_mla_row(arguments); });
}

// What sparse_mla.cu asks of the machine that C++ has no words for; a host that runs the kernel brings its own.

#include "machine.cuh"

#ifndef CUDA_HOST

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory, or puts zeros there.
__device__ __forceinline__ void copy_async(void* target, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(target)), "l"(source), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// A barrier of shared memory that ``arrivals`` threads complete, together with the bytes that they announce.
__device__ __forceinline__ void set_up(unsigned long long* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void announce(unsigned long long* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(unsigned long long* barrier, int parity) {
    asm volatile("{ .reg .pred done;\n\t"
                 "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Copies to shared memory by the engine that counts on the barrier.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// What was written before comes before what that engine writes later.
__device__ __forceinline__ void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 tiles of 16-bit elements; lane i gives where row i % 8 of tile i / 8 begins.
__device__ __forceinline__ void load_tiles(unsigned (&a)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&a)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}

// c [16, 8] += a [16, 16] @ b [16, 8]
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The lower two of four e4m3.
__device__ __forceinline__ float2 widened_e4m3(unsigned codes) {
    float2 both;
    asm("{ .reg .b16 low, high; .reg .b32 pair; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 pair, low;\n\t"
        "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(both.x), "=f"(both.y) : "r"(codes));
    return both;
}

__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
// What lies at ``mine`` in another block of the cluster.
__device__ __forceinline__ float load_of(unsigned rank, const float* mine) {
    float x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(x) : "r"(shared_address(mine)), "r"(rank) : "memory");
    return x;
}

extern __shared__ __align__(128) unsigned char dynamic_shared[];

#endif  // CUDA_HOST

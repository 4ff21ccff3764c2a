// What the kernels with TMA and wgmma or mma share: types, barriers in shared memory, bulk copies, conversions.
//
// The launcher puts this in front. IS_HALF: results are float16, else bfloat16. `tests/support/hopper_on_cpu.cpp` has what
// is behind __CUDACC__ for a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) Map {  // CUtensorMap
    u64 words[16];
};

#ifdef __CUDACC__
__device__ __forceinline__ u8 *shared_memory() {
    extern __shared__ __align__(1024) u8 shared[];
    return shared;
}
__device__ __forceinline__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void copy(u32 to, const void *from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_threads(int barrier, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ u64 evict_first() {  // a cache policy
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four float8_e4m3fn -> two pairs of float16.
__device__ __forceinline__ void widen(u32 v, u32 &low, u32 &high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(v));
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 pack_bfloat(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float exp2_of(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
// One matrix of 8 x 16 bytes per 8 lanes, whose addresses are those of the matrix's rows.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// An 8 x 8 matrix, of which lane 4 g + t has elements 2 t and 2 t + 1 of row g.
__device__ __forceinline__ u32 transpose_matrix(u32 both) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(both));
    return both;
}
#endif

__device__ __forceinline__ u32 narrow(float low, float high) { return IS_HALF ? pack_half(low, high) : pack_bfloat(low, high); }

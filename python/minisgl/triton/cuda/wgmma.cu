// What the GEMMs with 8-bit weights on Hopper share, behind `hopper.cu`. GATE: 0 none, 1 SiLU, 2 GELU with tanh.
//
// IS_INT: both operands are int8, and sums are exact. Otherwise they are float8_e4m3fn, and the tensor cores accumulate
// with only 14 bits: such a sum must not cover many columns.

#if IS_INT
typedef int4 Sums;
#else
typedef float4 Sums;
#endif

struct Arguments {
    Map x, weight;
    const float *x_scale, *scale;
    const u16 *bias;
    u16 *out;
    int rows, n_out, pairs;  // of steps, 128 columns each; the last may be beyond the end, where both operands are zero
    int scale_bytes;         // of x_scale
};

#ifdef __CUDACC__
__device__ __forceinline__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {  // without an order of accesses to memory
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
template <int COUNT>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ float reciprocal_of(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ float from_half(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
#endif

// A matrix of rows of 128 bytes, swizzled as by TMA.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)(address >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float gated(float gate, float up) {
    float z = gate;
    if (GATE == 2) z = fmaxf(1.5957691216057308f * gate * (1 + 0.044715f * gate * gate), -80.f);
    return gate * reciprocal_of(1 + exp2_of(z * -1.4426950408889634f)) * up;
}

__device__ __forceinline__ float widen(u16 v) { return IS_HALF ? from_half(v) : __uint_as_float((u32)v << 16); }

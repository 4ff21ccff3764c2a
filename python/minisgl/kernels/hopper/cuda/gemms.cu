// What the GEMMs with quantized weights on Hopper share; needs `wgmma.cu`. GATE: 0 none, 1 SiLU, 2 GELU with tanh, 3 of
// gpt-oss, with limits.
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

__device__ __forceinline__ float gated(float gate, float up) {
    float z = gate;
    if (GATE == 2) z = fmaxf(1.5957691216057308f * gate * (1 + 0.044715f * gate * gate), -80.f);
    if (GATE == 3) {
        gate = gate > 7 ? 7 : gate, up = (up > 7 ? 7 : up < -7 ? -7 : up) + 1;  // NaN stays
        z = 1.702f * gate;
    }
    return gate * reciprocal_of(1 + exp2_of(z * -1.4426950408889634f)) * up;
}

__device__ __forceinline__ float widen(u16 v) { return IS_HALF ? from_half(v) : __uint_as_float((u32)v << 16); }

// GEMV with 8-bit or 4-bit weights for Hopper: y = f(norm(x + residual)) W^T for a single row x.
//
// There is one CTA per SM. Each computes the same number of outputs and leaves half of the SM to the next GEMV's CTA,
// which prefetches its weights meanwhile. Each warp takes a slice of the columns and does not synchronize with the
// others until their sums are added up: a lane copies with cp.async exactly the weights that it multiplies. One operand
// of an MMA is 16 rows of weights, the other is x, repeated in all 8 columns (for int8, its two 8-bit parts in turn).
//
// A unit is 64 bytes of each of 16 rows: lane 4 g + t copies 16 bytes, from byte 16 t on, of rows g and g + 8. A cell
// is the 128 bytes in which 64 columns of x are stored: as float16, or as 64 high bytes followed by 64 low ones.
//
// Macros from the compiler's options: WARPS, BITS, IS_FP8, N_IN, UNITS (per stage), STAGES, ROWS (weight rows per CTA),
// HAS_NORM, GATE (0 none, 1 SiLU, 2 GELU with tanh), HAS_ZEROS, IS_HALF (x is float16, else bfloat16), SCALE_IS_HALF
// (of the scales of 4-bit weights).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define WIDTH (N_IN * BITS / 8)  // bytes per row
#define MAX_THREADS 640          // including idle warps

struct Arguments {
    const u16 *x, *residual;
    u16 *total;
    const u16 *norm_weight;
    const u8 *weight;
    const void *scale, *zeros;
    const u16 *bias;
    u16 *out;
    int n_out;
    float eps;
};

struct Four {
    u32 v[4];
};

#ifdef __CUDACC__
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
template <int BYTES>
__device__ __forceinline__ void copy_async(void *to, const void *from, bool is_valid) {
    u32 address = (u32)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                     "r"(is_valid ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES),
                     "r"(is_valid ? BYTES : 0) : "memory");
}
__device__ __forceinline__ void wait_for_warps() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ uint2 load_from_l2(const u16 *from) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void fp8_to_half(u32 bytes, u32 &low, u32 &high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(bytes));
}
__device__ __forceinline__ void mma_half(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <bool IS_SIGNED>
__device__ __forceinline__ void mma_bytes(int *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (IS_SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 most_of_warp(u32 v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ int sum_of_warp(int v) { return __reduce_add_sync(~0u, v); }
__device__ __forceinline__ float sum_of_warp(float v) {
    for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
__device__ __forceinline__ float from_half(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
__device__ __forceinline__ u16 to_half(float f) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
__device__ __forceinline__ u16 to_bfloat(float f) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
#endif

template <bool HALF>
__device__ __forceinline__ float widen(u16 v) { return HALF ? from_half(v) : __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u16 narrow(float f) { return IS_HALF ? to_half(f) : to_bfloat(f); }

constexpr int UNITS_IN_ROW = WIDTH / 64;
constexpr int WARP_UNITS = (UNITS_IN_ROW + WARPS * UNITS - 1) / (WARPS * UNITS) * UNITS;
constexpr int WARP_COLUMNS = WARP_UNITS * (512 / BITS);
constexpr int BLOCKS = (WARP_COLUMNS + 127) / 128;  // of 128 columns, 4 per lane
constexpr int STEPS = WARP_UNITS / UNITS;           // stages per tile
constexpr int SCALE_BYTES = BITS == 4 ? 2 * UNITS : 0;
constexpr int STAGE_BYTES = UNITS * 1024 + 32 * SCALE_BYTES;
constexpr int TILE = GATE ? 8 : 16;  // outputs per tile; with GATE its rows are 8 of gate, then 8 of up

struct __align__(32) Warp {  // copies into rings that begin amid a 32-byte sector are slower
    u8 ring[STAGES * STAGE_BYTES];
    u8 x[BLOCKS * 256];
    float2 groups[BLOCKS];  // for 4-bit weights: scale, and what a zero point of 1 adds
    float sums[ROWS];
};

// Copy the weights of a stage, and for 4-bit weights their scales and zero points.
__device__ __forceinline__ void load(const Arguments &a, u8 *slot, int row, int last, int unit, int lane) {
    int g = lane / 4, t = lane % 4;
    long long low = min(row + g, last), high = GATE ? low + a.n_out : min(row + g + 8, last);
    const u8 *from_low = a.weight + low * WIDTH + unit * 64 + t * 16;
    const u8 *from_high = a.weight + high * WIDTH + unit * 64 + t * 16;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        copy_async<16>(slot + u * 1024 + lane * 16, from_low + u * 64, unit + u < UNITS_IN_ROW);
        copy_async<16>(slot + u * 1024 + 512 + lane * 16, from_high + u * 64, unit + u < UNITS_IN_ROW);
    }
#if BITS == 4
    if (HAS_ZEROS ? true : t < 2) {
        const u8 *from = (const u8 *)(t < 2 ? a.scale : a.zeros) + (t % 2 ? high : low) * (N_IN / 64) + unit * 2;
        copy_async<SCALE_BYTES>(slot + UNITS * 1024 + (t * 8 + g) * SCALE_BYTES, from, unit < UNITS_IN_ROW);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) gemv(const Arguments a) {
    launch_dependents();
    if (threadIdx.x >= WARPS * 32) return;  // idle warps only occupy registers
    extern __shared__ __align__(16) u8 shared[];
    Warp *warps = (Warp *)shared;
    float *squares = (float *)(warps + WARPS);
    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    Warp &my = warps[warp];
    int first = (int)((long long)blockIdx.x * a.n_out / gridDim.x);
    int last = (int)((blockIdx.x + 1LL) * a.n_out / gridDim.x) - 1;
    int stages = (last - first + TILE) / TILE * STEPS, column = warp * WARP_COLUMNS;

    // Before the wait, load only what no kernel writes: the first stages of weights, and parameters.
    int row = first, step = 0, loaded = 0;
    auto load_next = [&](int slot) {
        if (loaded++ < stages) {
            load(a, my.ring + slot * STAGE_BYTES, row, last, warp * WARP_UNITS + step * UNITS, lane);
            if (++step == STEPS) step = 0, row += TILE;
        }
        commit();
    };
    for (int i = 0; i < STAGES; i++) load_next(i);
    float scale[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
    int output = first + thread;
    if (output <= last) {
        for (int i = 0; i < (GATE ? 2 : 1); i++) {
            if (BITS == 8) scale[i] = ((const float *)a.scale)[output + i * a.n_out];
            if (a.bias) bias[i] = widen<IS_HALF>(a.bias[output + i * a.n_out]);
        }
    }
    uint2 raw[BLOCKS], norm[HAS_NORM ? BLOCKS : 1] = {};
    auto is_mine = [&](int block) {
        int offset = block * 128 + lane * 4;
        return offset < WARP_COLUMNS && column + offset < N_IN;
    };
#if HAS_NORM
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        if (is_mine(i)) norm[i] = *(const uint2 *)(a.norm_weight + column + i * 128 + lane * 4);
    }
#endif
    wait_for_predecessor();

    // Load this warp's columns of x, and store them in its cells.
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        raw[i] = make_uint2(0, 0);
        if (is_mine(i)) raw[i] = load_from_l2(a.x + column + i * 128 + lane * 4);
    }
    auto half_of = [](uint2 v, int i) { return (u16)((i < 2 ? v.x : v.y) >> (i % 2 * 16)); };
    if (a.residual) {
        uint2 other[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            other[i] = make_uint2(0, 0);
            if (is_mine(i)) other[i] = load_from_l2(a.residual + column + i * 128 + lane * 4);
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u32 total[4];
            for (int j = 0; j < 4; j++)
                total[j] = narrow(widen<IS_HALF>(half_of(raw[i], j)) + widen<IS_HALF>(half_of(other[i], j)));
            raw[i] = make_uint2(total[0] | total[1] << 16, total[2] | total[3] << 16);
            if (blockIdx.x == 0 && is_mine(i)) *(uint2 *)(a.total + column + i * 128 + lane * 4) = raw[i];
        }
    }
    float square = 0.0f, factor = 1.0f;  // this warp's sums are multiplied by `factor`
    u32 most = 0;
    auto value = [&](int block, int j) {
        float v = widen<IS_HALF>(half_of(raw[block], j));
        return HAS_NORM ? v * widen<IS_HALF>(half_of(norm[HAS_NORM ? block : 0], j)) : v;
    };
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        u32 block_most = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float v = widen<IS_HALF>(half_of(raw[i], j));
            square += v * v;
            block_most = max(block_most, __float_as_uint(value(i, j)) & 0x7fffffff);  // NaN > any number, as an integer
        }
        if (BITS == 4) {
            block_most = most_of_warp(block_most);
            float scale = fmaxf(__uint_as_float(block_most), 1e-30f) / 16256.0f;
            if (block_most > 0x7f800000) scale = __uint_as_float(block_most);
            float up = 1.0f / scale;
            int q[4], sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) sum += q[j] = __float2int_rn(value(i, j) * up);
            sum = sum_of_warp(sum);
            u32 high = 0, low = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int part = (q[j] + 64) >> 7;
                high |= (part & 255) << (8 * j);
                low |= ((q[j] - part * 128) & 255) << (8 * j);
            }
            u8 *cell = my.x + (i * 2 + lane / 16) * 128 + lane % 16 * 4;
            *(u32 *)cell = high;
            *(u32 *)(cell + 64) = low;
            if (lane == 0) my.groups[i] = make_float2(scale / 16.0f, scale * (float)sum);
        }
        most = max(most, block_most);
    }
    if (BITS == 8) {
        most = most_of_warp(most);
#if IS_FP8
        // Scale x so that its largest element is near 2^15: float16 then has enough range for the others.
        u32 exponent = max(most >> 23, 15u);
        float up = __uint_as_float((268 - exponent) << 23);
        factor = __uint_as_float((exponent - 14) << 23);
#else
        float up = 16256.0f / fmaxf(__uint_as_float(most), 1e-30f);
        factor = most > 0x7f800000 ? __uint_as_float(most) : 1.0f / up;
#endif
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u32 words[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (IS_FP8) {
                    words[j / 2] |= (u32)to_half(value(i, j) * up) << (j % 2 * 16);
                } else {
                    int q = __float2int_rn(value(i, j) * up), part = (q + 64) >> 7;
                    words[0] |= (part & 255) << (8 * j);
                    words[1] |= ((q - part * 128) & 255) << (8 * j);
                }
            }
            u8 *cell = my.x + (i * 2 + lane / 16) * 128;
            if (IS_FP8) {
                *(uint2 *)(cell + lane % 16 * 8) = make_uint2(words[0], words[1]);
            } else {
                *(u32 *)(cell + lane % 16 * 4) = words[0];
                *(u32 *)(cell + 64 + lane % 16 * 4) = words[1];
            }
        }
    }
    square = sum_of_warp(square);
    if (lane == 0) squares[warp] = square;
    __syncwarp();

    // Stream the weights.
#if IS_FP8
    float sums[2][4] = {};
#elif BITS == 8
    int sums[2][4] = {};
#endif
    float low_sum = 0.0f, high_sum = 0.0f;
    int slot = 0;
    auto four = [](const u8 *from) { return *(const Four *)from; };
#pragma unroll 1
    for (int stage = 0, done = 0, row_of_tile = 0; stage < stages; stage++) {
        wait_for_copies<STAGES - 1>();
        if (BITS == 4) __syncwarp();
        u8 *from = my.ring + slot * STAGE_BYTES;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            Four low = four(from + u * 1024 + lane * 16), high = four(from + u * 1024 + 512 + lane * 16);
            int unit = done * UNITS + u;
#if IS_FP8
            Four x[2] = {four(my.x + unit * 128 + t * 32), four(my.x + unit * 128 + t * 32 + 16)};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 a0, a1, a2, a3;
                fp8_to_half(low.v[j], a0, a2);
                fp8_to_half(high.v[j], a1, a3);
                mma_half(sums[j % 2], a0, a1, a2, a3, x[j / 2].v[j % 2 * 2], x[j / 2].v[j % 2 * 2 + 1]);
            }
#elif BITS == 8
            Four x = four(my.x + unit * 128 + g % 2 * 64 + t * 16);
#pragma unroll
            for (int j = 0; j < 2; j++)
                mma_bytes<true>(sums[j], low.v[2 * j], high.v[2 * j], low.v[2 * j + 1], high.v[2 * j + 1], x.v[2 * j],
                                x.v[2 * j + 1]);
#else
            // Low nibbles have their own value, high ones 16 times theirs.
            int c[2][4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 mask = half ? 0xf0f0f0f0u : 0x0f0f0f0fu;
                Four x = four(my.x + (unit * 2 + half) * 128 + g % 2 * 64 + t * 16);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    mma_bytes<false>(c[half], low.v[2 * j] & mask, high.v[2 * j] & mask, low.v[2 * j + 1] & mask,
                                     high.v[2 * j + 1] & mask, x.v[2 * j], x.v[2 * j + 1]);
            }
            float2 group = my.groups[unit];
            auto number = [&](int which) {
                const u8 *p = from + UNITS * 1024 + (which * 8 + g) * SCALE_BYTES + u * 2;
                return widen<SCALE_IS_HALF>(*(const u16 *)p);
            };
            float zero_low = 8.0f, zero_high = 8.0f;
            if (HAS_ZEROS) zero_low = number(2), zero_high = number(3);
            int total_low = (c[0][0] * 16 + c[1][0]) * 128 + c[0][1] * 16 + c[1][1];
            int total_high = (c[0][2] * 16 + c[1][2]) * 128 + c[0][3] * 16 + c[1][3];
            low_sum += ((float)total_low * group.x - zero_low * group.y) * number(0);
            high_sum += ((float)total_high * group.x - zero_high * group.y) * number(1);
#endif
        }
        if (BITS == 4) __syncwarp();
        load_next(slot);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (++done == STEPS) {
#if IS_FP8
            low_sum = (sums[0][0] + sums[1][0]) * factor, high_sum = (sums[0][2] + sums[1][2]) * factor;
#elif BITS == 8
            low_sum = ((float)(sums[0][0] + sums[1][0]) * 128.0f + (float)(sums[0][1] + sums[1][1])) * factor;
            high_sum = ((float)(sums[0][2] + sums[1][2]) * 128.0f + (float)(sums[0][3] + sums[1][3])) * factor;
#endif
            if (t == 0) my.sums[row_of_tile + g] = low_sum, my.sums[row_of_tile + g + 8] = high_sum;
            low_sum = high_sum = 0.0f;
#if BITS == 8
#pragma unroll
            for (int i = 0; i < 8; i++) sums[i / 4][i % 4] = 0;
#endif
            done = 0, row_of_tile += 16;
        }
    }
    wait_for_warps();

    if (output <= last) {
        float norm_factor = 1.0f, result[2] = {0.0f, 0.0f};
        if (HAS_NORM) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) sum += squares[w];
            norm_factor = rsqrtf(sum / (float)N_IN + a.eps);
        }
        for (int i = 0; i < (GATE ? 2 : 1); i++) {
            int r = GATE ? thread / 8 * 16 + thread % 8 + 8 * i : thread;
            for (int w = 0; w < WARPS; w++) result[i] += warps[w].sums[r];
            result[i] = result[i] * norm_factor * scale[i] + bias[i];
        }
        if (GATE) {
            float gate = result[0], z = gate;
            if (GATE == 2) z = fmaxf(1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate), -80.0f);
            result[0] = gate / (1.0f + __expf(-z)) * result[1];
        }
        a.out[output] = narrow(result[0]);
    }
}

// y = f(norm(x + residual)) W^T for one row x and weights in 8 or 4 bits, on Hopper.
//
// One CTA on each SM has an equal share of the outputs and about half of the SM, so that the next kernel's CTA fills its
// ring with weights meanwhile. Each warp has a part of the columns and works alone until the sums are added up: a lane
// copies to its ring, with cp.async, just the weights that it computes with. Tensor cores take the weights of 16 rows as
// one operand and x as the other, the same in all 8 columns (for integers: two parts of 8 bits in turn).
//
// A unit is 64 bytes of 16 rows; lane 4 g + t has 16 bytes of rows g and g + 8, from 16 t on. A cell is the 128 bytes
// that 64 columns of x take: float16, or 64 high bytes and then 64 low ones.
// The compiler's options define WARPS, BITS, IS_FP8, N_IN, UNITS (of a stage), STAGES, ROWS (of a CTA's tiles),
// HAS_NORM, GATE (0, 1 SiLU, 2 GELU with tanh), HAS_ZEROS, IS_HALF (x is float16, else bfloat16) and SCALE_IS_HALF (of
// 4 bits). `tests/support/gemv_on_cpu.cpp` compiles this file for a CPU.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define WIDTH (N_IN * BITS / 8)  // bytes of a row
#define MAX_THREADS 640          // with the idle warps

#if IS_FP8
typedef float Sum;
#define X_BITS 15  // the largest number of a warp's x is from 2^(X_BITS - 1) to 2^X_BITS
#define SUM "+f"
#define TYPES "m16n8k16.row.col.f32.f16.f16.f32"
#else
typedef int Sum;
#define X_BITS 13
#define SUM "+r"
#if BITS == 8
#define TYPES "m16n8k32.row.col.s32.s8.s8.s32"
#else
#define TYPES "m16n8k32.row.col.s32.u8.s8.s32"
#endif
#endif

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
__device__ __forceinline__ bool is_idle() { return __all_sync(~0u, threadIdx.x >= WARPS * 32); }
__device__ __forceinline__ void wait_for_warps() { asm volatile("bar.sync 0;" ::: "memory"); }
template <int BYTES>
__device__ __forceinline__ void copy_async(void *to, const void *from, bool is_valid) {
    u32 address = (u32)__cvta_generic_to_shared(to), size = is_valid ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(size) : "memory");
}
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
__device__ __forceinline__ void mma(Sum *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : SUM(c[0]), SUM(c[1]), SUM(c[2]), SUM(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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
constexpr int BLOCKS = (WARP_COLUMNS + 127) / 128;  // of 128 columns, 4 for each lane
constexpr int STEPS = WARP_UNITS / UNITS;           // stages of a tile
constexpr int SCALE_BYTES = BITS == 4 ? 2 * UNITS : 0;
constexpr int STAGE_BYTES = UNITS * 1024 + 32 * SCALE_BYTES;
constexpr int TILE = GATE ? 8 : 16;  // outputs of a tile; its rows are those of gate, and then those of up

struct __align__(128) Warp {
    u8 ring[STAGES * STAGE_BYTES];
    u8 x[BLOCKS * 256];
    float groups[BLOCKS];  // of 4 bits: what a zero point of 1 adds
    float sums[ROWS];
    float square;  // the sum of squares of this warp's x
};

// Copy the weights of a stage, and with 4 bits the scales and zeros.
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
    if (HAS_ZEROS || t < 2) {
        const u8 *from = (const u8 *)(t < 2 ? a.scale : a.zeros) + (t % 2 ? high : low) * (N_IN / 64) + unit * 2;
        copy_async<SCALE_BYTES>(slot + UNITS * 1024 + (t * 8 + g) * SCALE_BYTES, from, unit < UNITS_IN_ROW);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) gemv(const Arguments a) {
    launch_dependents();
    if (is_idle()) return wait_for_warps();  // a warp keeps its registers until it ends
    extern __shared__ __align__(128) u8 shared[];
    Warp *warps = (Warp *)shared;
    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    Warp &my = warps[warp];
    int first = (int)(blockIdx.x * (u32)a.n_out / gridDim.x), last = (int)((blockIdx.x + 1) * (u32)a.n_out / gridDim.x) - 1;
    int stages = (last - first + TILE) / TILE * STEPS, column = warp * WARP_COLUMNS;

    // Before the wait: the first stages, and what else no kernel writes.
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
    auto is_mine = [&](int block) {
        int offset = block * 128 + lane * 4;
        return offset < WARP_COLUMNS && column + offset < N_IN;
    };
    auto half_of = [](uint2 v, int i) { return (u16)((i < 2 ? v.x : v.y) >> (i % 2 * 16)); };
    uint2 raw[BLOCKS] = {}, other[BLOCKS] = {}, norm[BLOCKS] = {};
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        if (HAS_NORM && is_mine(i)) norm[i] = *(const uint2 *)(a.norm_weight + column + i * 128 + lane * 4);
    }
    wait_for_predecessor();

    // x of this warp's columns, into its cells. The factor of the norm comes at the end.
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        if (is_mine(i)) raw[i] = load_from_l2(a.x + column + i * 128 + lane * 4);
    }
    if (HAS_NORM && a.residual) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
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
    auto value = [&](int block, int j) {
        float v = widen<IS_HALF>(half_of(raw[block], j));
        return HAS_NORM ? v * widen<IS_HALF>(half_of(norm[block], j)) : v;
    };
    float square = 0.0f;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS * 4; i++) {
        float v = widen<IS_HALF>(half_of(raw[i / 4], i % 4));
        square += v * v;
        most = max(most, __float_as_uint(value(i / 4, i % 4)) & 0x7fffffff);
    }
    square = sum_of_warp(square);
    if (lane == 0) my.square = square;
    most = most_of_warp(most);
    u32 exponent = max(most >> 23, 32u);
    float up = __uint_as_float((253 + X_BITS - exponent) << 23);
    float factor = __uint_as_float((exponent + 1 - X_BITS - (BITS == 4 ? 4 : 0)) << 23);
    if (most >= 0x7f800000) factor = __uint_as_float(most);  // no integer is infinite or NaN
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        u32 words[2] = {0, 0};
        int sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float v = value(i, j) * up;
            if (IS_FP8) {
                words[j / 2] |= (u32)to_half(v) << (j % 2 * 16);
            } else {
                int q = __float2int_rn(v), high = (q + 64) >> 7;
                words[0] |= (high & 255) << (8 * j);
                words[1] |= ((q - high * 128) & 255) << (8 * j);
                sum += q;
            }
        }
        u8 *cell = my.x + (i * 2 + lane / 16) * 128 + lane % 16 * (IS_FP8 ? 8 : 4);
        *(u32 *)cell = words[0];
        *(u32 *)(cell + (IS_FP8 ? 4 : 64)) = words[1];
        if (BITS == 4) {
            sum = sum_of_warp(sum);
            if (lane == 0) my.groups[i] = 16.0f * (float)sum;
        }
    }
    __syncwarp();

    // The stream.
#if BITS == 8
    Sum sums[2][4] = {};
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
                mma(sums[j % 2], a0, a1, a2, a3, x[j / 2].v[j % 2 * 2], x[j / 2].v[j % 2 * 2 + 1]);
            }
#elif BITS == 8
            Four x = four(my.x + unit * 128 + g % 2 * 64 + t * 16);
#pragma unroll
            for (int j = 0; j < 2; j++)
                mma(sums[j], low.v[2 * j], high.v[2 * j], low.v[2 * j + 1], high.v[2 * j + 1], x.v[2 * j], x.v[2 * j + 1]);
#else
            // Low halves as they are and high ones as 16 times what they are.
            int c[2][4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 mask = half ? 0xf0f0f0f0u : 0x0f0f0f0fu;
                Four x = four(my.x + (unit * 2 + half) * 128 + g % 2 * 64 + t * 16);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    mma(c[half], low.v[2 * j] & mask, high.v[2 * j] & mask, low.v[2 * j + 1] & mask,
                        high.v[2 * j + 1] & mask, x.v[2 * j], x.v[2 * j + 1]);
            }
            auto number = [&](int which) {
                return widen<SCALE_IS_HALF>(*(const u16 *)(from + UNITS * 1024 + (which * 8 + g) * SCALE_BYTES + u * 2));
            };
            auto total = [&](int i) { return (float)((c[0][i] * 16 + c[1][i]) * 128 + c[0][i + 1] * 16 + c[1][i + 1]); };
            low_sum += (total(0) - (HAS_ZEROS ? number(2) : 8.0f) * my.groups[unit]) * number(0);
            high_sum += (total(2) - (HAS_ZEROS ? number(3) : 8.0f) * my.groups[unit]) * number(1);
#endif
        }
        if (BITS == 4) __syncwarp();
        load_next(slot);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (++done == STEPS) {
#if BITS == 8
            // Of integers the first column has the products with high bytes, the second those with low ones.
            for (int i = 0; i < 2; i++) {
                low_sum += (float)sums[i][0] * (IS_FP8 ? 1.0f : 128.0f) + (IS_FP8 ? 0.0f : (float)sums[i][1]);
                high_sum += (float)sums[i][2] * (IS_FP8 ? 1.0f : 128.0f) + (IS_FP8 ? 0.0f : (float)sums[i][3]);
                sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
            }
#endif
            if (t == 0) my.sums[row_of_tile + g] = low_sum * factor, my.sums[row_of_tile + g + 8] = high_sum * factor;
            low_sum = high_sum = 0.0f;
            done = 0, row_of_tile += 16;
        }
    }
    wait_for_warps();

    if (output <= last) {
        float norm_factor = 1.0f, result[2] = {0.0f, 0.0f};
        if (HAS_NORM) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) sum += warps[w].square;
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
            result[0] = __fdividef(gate, 1.0f + __expf(-z)) * result[1];
        }
        a.out[output] = narrow(result[0]);
    }
}

// Chains of GEMVs with 8-bit or 4-bit weights for Hopper.
//
// A GEMV is y = f(norm(x + residual)) W^T for a single row x, and each y is the next x. A chain may be a single GEMV.
//
// There is one CTA per SM, and each computes an equal share of every GEMV's outputs. Each warp takes a slice of the
// columns and does not synchronize with the others until their sums are added up: a lane copies with cp.async exactly
// the weights that it multiplies. Its ring of copies runs on from one GEMV to the next, so memory is busy while warps
// wait for results. A result carries the launch's number in its low half: readers load it until the number is right. A
// single GEMV's CTA leaves half of the SM to the next kernel's, which prefetches its weights meanwhile.
//
// One operand of an MMA is 16 rows of weights, the other is x, repeated in all 8 columns (for int8, its two 8-bit parts
// in turn). A unit is 64 bytes of each of 16 rows: lane 4 g + t copies 16 bytes, from byte 16 t on, of rows g and g + 8.
// A cell is the 128 bytes in which 64 columns of x are stored: as float16, or as 64 high bytes followed by 64 low ones.
//
// A single GEMV may also be one of the two of a token's experts. EXPERTS 1: gate and up, with the outputs of all
// experts one after the other. EXPERTS 2: down, with the experts' matrices side by side, so that their results add up;
// no warp multiplies two of them.
//
// Macros from the compiler's options: WARPS, BITS, IS_FP8, UNITS (per stage), STAGES, SHAPES (a `Shape` for each GEMV),
// HAS_ZEROS, IS_HALF (x is float16, else bfloat16), SCALE_IS_HALF (of the scales of 4-bit weights), EXPERTS, TOP_K (or 1).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Shape {
    int n_in, rows;  // columns; weight rows per CTA, a multiple of 16
    bool has_norm;
    int gate;  // 0 none, 1 SiLU, 2 GELU with tanh
};
constexpr Shape shapes[] = {SHAPES};
constexpr int COUNT = sizeof(shapes) / sizeof(Shape);
constexpr int MAX_THREADS = COUNT > 1 ? WARPS * 32 : 640;  // including idle warps

struct Link {
    const u8 *weight;
    const void *scale, *zeros;
    const u16 *bias, *norm_weight;
    u16 *total;    // x + residual, if there is a residual
    u32 *results;  // of all GEMVs but the last
    int n_out;
    float eps;
};

struct Arguments {
    const u16 *x;
    union {
        const u16 *residual;
        const u32 *experts;  // the token's
    };
    u16 *out;
    union {
        u32 *launch;           // its number; the next launch's is one more
        const float *choices;  // the experts' weights
    };
    Link links[COUNT];
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
__device__ __forceinline__ u32 load_from_l2(const u32 *from) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_choice(const void *from) {  // made by a kernel before the preceding one
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ Four load_results(const u32 *from) {
    Four f;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "l"(from) : "memory");
    return f;
}
__device__ __forceinline__ void store_result(u32 *to, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ u8 *shared_memory() {
    extern __shared__ __align__(16) u8 shared[];
    return shared;
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
__device__ __forceinline__ u32 max_of_warp(u32 v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ int sum_of_warp(int v) { return __reduce_add_sync(~0u, v); }
__device__ __forceinline__ int sum_of_bytes(u32 v) { return __dp4a((int)v, 0x01010101, 0); }
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

// -- Sizes

__device__ constexpr int width_of(int link) { return shapes[link].n_in * BITS / 8; }  // bytes per row
__device__ constexpr int row_width_of(int link) { return width_of(link) / (EXPERTS == 2 ? TOP_K : 1); }
__device__ constexpr int tile_of(int link) { return shapes[link].gate ? 8 : 16; }     // outputs; with a gate, 8 rows of gate and 8 of up
__device__ constexpr int warp_units_of(int link) { return (width_of(link) / 64 + WARPS * UNITS - 1) / (WARPS * UNITS) * UNITS; }
__device__ constexpr int warp_columns_of(int link) { return warp_units_of(link) * (512 / BITS); }
__device__ constexpr int blocks_of(int link) { return (warp_columns_of(link) + 127) / 128; }  // of 128 columns, 4 per lane
__device__ constexpr int max_blocks() {
    int largest = 0;
    for (int i = 0; i < COUNT; i++) largest = largest > blocks_of(i) ? largest : blocks_of(i);
    return largest;
}
__device__ constexpr int max_rows(int first) {  // of every second GEMV
    int largest = 0;
    for (int i = first; i < COUNT; i += 2) largest = largest > shapes[i].rows ? largest : shapes[i].rows;
    return largest;
}
__device__ constexpr int norms_before(int link) {
    int count = 0;
    for (int i = 0; i < link; i++) count += shapes[i].has_norm;
    return count;
}
constexpr int ROW_WARPS = EXPERTS == 2 ? WARPS / TOP_K : WARPS;  // that share a row of weights
constexpr int BLOCKS = max_blocks(), EVEN_ROWS = max_rows(0), ODD_ROWS = max_rows(1);
constexpr int SCALE_BYTES = BITS == 4 ? 2 * UNITS : 0;
constexpr int STAGE_BYTES = UNITS * 1024 + 32 * SCALE_BYTES;

struct __align__(32) Warp {  // copies into rings that begin amid a 32-byte sector are slower
    u8 ring[STAGES * STAGE_BYTES];
    u8 x[BLOCKS * 256];
    float2 groups[BLOCKS];  // for 4-bit weights: scale, and what a zero point of 1 adds
    float sums[EVEN_ROWS + ODD_ROWS];
};

struct __align__(16) Share {  // a CTA's part of a GEMV
    int first, outputs;
    int tile, stages, units, skip;  // of a warp's tile; units of a row; bytes from a tile's end in a row to the next tile
};
struct Cta {
    Warp warps[WARPS];
    union {
        float squares[WARPS];
        u32 experts[WARPS];
    };
    Share shares[COUNT];
};

// -- Copies of weights

struct Cursor {  // the next stage to copy
    const u8 *low, *high, *numbers;  // this lane's, in rows g and g + 8 of the tile, and its scale or zero point
    int link, outputs;               // left of the link
    int stages;                      // left of the tile
    int low_units, high_units;       // left of the two rows; none of a row beyond the last one
};

template <int I = 0>
__device__ __forceinline__ void set_shares(const Arguments &a, Cta &cta) {
    if (threadIdx.x == I) {
        u32 size = EXPERTS == 1 ? 8 : 1, count = (u32)a.links[I].n_out * (EXPERTS == 1 ? TOP_K : 1) / size;
        u32 first = blockIdx.x * count / gridDim.x * size;
        cta.shares[I] = {(int)first, (int)((blockIdx.x + 1) * count / gridDim.x * size - first), tile_of(I), warp_units_of(I) / UNITS,
                         row_width_of(I) / 64, tile_of(I) * row_width_of(I) - warp_units_of(I) * 64};
    }
    if (EXPERTS && threadIdx.x < TOP_K) cta.experts[threadIdx.x] = load_choice(a.experts + threadIdx.x);
    if constexpr (I + 1 < COUNT) set_shares<I + 1>(a, cta);
}

// Which of the warps of a row this is.
__device__ __forceinline__ int warp_of_row() {
    int warp = (int)threadIdx.x / 32;
    return EXPERTS == 2 ? warp % ROW_WARPS : warp;
}

__device__ __forceinline__ void set_tile(const Cta &cta, Cursor &c) {
    const Share &share = cta.shares[c.link];
    int g = (int)threadIdx.x % 32 / 4, units = share.units - warp_of_row() * share.stages * UNITS;
    c.stages = c.outputs > 0 ? share.stages : 0;
    c.low_units = g < c.outputs ? units : 0;
    c.high_units = g + share.tile - 8 < c.outputs ? units : 0;
}

// The row of weights of an output, for a warp.
__device__ __forceinline__ auto row_of(const Cta &cta, int n_out, int output, int warp) {
#if EXPERTS == 1
    return cta.experts[output / n_out] * 2ll * n_out + output % n_out;
#elif EXPERTS == 2
    return (long long)cta.experts[warp / ROW_WARPS] * n_out + output;
#else
    return output;
#endif
}

// Point to the first tile that is left.
__device__ __forceinline__ void set_pointers(const Arguments &a, const Cta &cta, Cursor &c) {
    const Link &link = a.links[c.link];
    const Share &share = cta.shares[c.link];
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, width = share.units * 64;
    int unit = warp_of_row() * share.stages * UNITS;
    int output = EXPERTS == 1 ? share.first + share.outputs - c.outputs : share.first;
    long long low = row_of(cta, link.n_out, output, (int)threadIdx.x / 32) + g;
    long long high = low + (share.tile == 8 ? link.n_out : 8);
    c.low = link.weight + low * width + unit * 64 + t * 16;
    c.high = link.weight + high * width + unit * 64 + t * 16;
    if (BITS == 4) c.numbers = (const u8 *)(t < 2 ? link.scale : link.zeros) + (t % 2 ? high : low) * (width / 32) + unit * 2;
}

// Go to the first tile of the next GEMV of which this CTA has a part.
__device__ __forceinline__ void set_link(const Arguments &a, const Cta &cta, Cursor &c) {
    while (cta.shares[c.link].outputs == 0 && c.link + 1 < COUNT) c.link++;
    c.outputs = cta.shares[c.link].outputs;
    set_pointers(a, cta, c), set_tile(cta, c);
}

// Copy the weights of a stage, and for 4-bit weights their scales and zero points. Without any left, commit nothing.
__device__ __forceinline__ void load_next(const Arguments &a, const Cta &cta, Cursor &c, u8 *slot) {
    if (c.stages) {
        int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            copy_async<16>(slot + u * 1024 + lane * 16, c.low + u * 64, u < c.low_units);
            copy_async<16>(slot + u * 1024 + 512 + lane * 16, c.high + u * 64, u < c.high_units);
        }
#if BITS == 4
        if (HAS_ZEROS ? true : lane % 4 < 2)
            copy_async<SCALE_BYTES>(slot + UNITS * 1024 + (lane % 4 * 8 + lane / 4) * SCALE_BYTES, c.numbers,
                                    (lane % 2 ? c.high_units : c.low_units) > 0);
        c.numbers += 2 * UNITS;
#endif
        c.low += 64 * UNITS, c.high += 64 * UNITS, c.low_units -= UNITS, c.high_units -= UNITS;
        if (--c.stages == 0) {
            const Share &share = cta.shares[c.link];
            c.outputs -= share.tile, c.low += share.skip, c.high += share.skip, c.numbers += share.skip / 32;
            if (EXPERTS == 1 && c.outputs > 0) set_pointers(a, cta, c);  // the next tile may be another expert's
            set_tile(cta, c);
            if (c.stages == 0 && c.link + 1 < COUNT) c.link++, set_link(a, cta, c);
        }
    }
    commit();
}

// -- A GEMV

struct State {
    Cta &cta;
    Cursor cursor;
    int slot;
    u32 launch;
    uint2 total[BLOCKS];  // this warp's columns of the last x + residual
};

__device__ __forceinline__ u16 half_of(uint2 v, int i) { return (u16)((i < 2 ? v.x : v.y) >> (i % 2 * 16)); }

// Four integers as 128 times a byte plus a byte.
struct Parts {
    u32 high, low;
};
__device__ __forceinline__ u32 low_bytes(float a, float b, float c, float d) {
    u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    return __byte_perm(ab, __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040), 0x5410);
}
__device__ __forceinline__ Parts split(float a, float b, float c, float d) {  // rounds them; |a| <= 16256
    constexpr float SHIFT = 12582912.0f;  // plus it, a small number is rounded to an integer, in the low bits
    float v[4] = {a, b, c, d}, high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = v[i] * (1.0f / 128.0f) + SHIFT;
        low[i] = v[i] - (high[i] - SHIFT) * 128.0f + SHIFT;
    }
    return {low_bytes(high[0], high[1], high[2], high[3]), low_bytes(low[0], low[1], low[2], low[3])};
}

template <int L>
__device__ __forceinline__ void multiply(const Arguments &a, State &s) {
    constexpr int N_IN = shapes[L].n_in, GATE = shapes[L].gate, TILE = tile_of(L), STEPS = warp_units_of(L) / UNITS;
    constexpr int WARP_COLUMNS = warp_columns_of(L), BLOCKS = blocks_of(L), SUMS = L % 2 ? EVEN_ROWS : 0;
    constexpr bool HAS_NORM = shapes[L].has_norm;
    const Link &link = a.links[L];
    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    Warp &my = s.cta.warps[warp];
    Share own = s.cta.shares[L];
    int column = warp * WARP_COLUMNS, output = own.first + thread;
    bool has_output = thread < own.outputs;

    // Before x is there, load what no kernel writes.
    float scale[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f}, of_warp[WARPS];  // of the rows that each warp multiplies
    if (has_output && EXPERTS == 2 && BITS == 8) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) of_warp[w] = ((const float *)link.scale)[row_of(s.cta, link.n_out, output, w)];
    }
    if (has_output) {
        for (int i = 0; i < (GATE ? 2 : 1); i++) {
            if (BITS == 8 && EXPERTS < 2) scale[i] = ((const float *)link.scale)[row_of(s.cta, link.n_out, output, warp) + i * link.n_out];
            if (link.bias) bias[i] = widen<IS_HALF>(link.bias[output + i * link.n_out]);
        }
    }
    uint2 raw[BLOCKS], norm[HAS_NORM ? BLOCKS : 1] = {};
    auto is_mine = [&](int block) {
        int offset = block * 128 + lane * 4;
        return offset < WARP_COLUMNS && column + offset < N_IN;
    };
    if (HAS_NORM) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if (is_mine(i)) norm[HAS_NORM ? i : 0] = *(const uint2 *)(link.norm_weight + column + i * 128 + lane * 4);
        }
    }
    const float choice = EXPERTS == 2 ? __uint_as_float(load_choice(a.choices + warp / ROW_WARPS)) : 1.0f;
    if (L == 0) wait_for_predecessor();

    // Load this warp's columns of x, and store them in its cells.
    constexpr bool IS_CARRIED = HAS_NORM && norms_before(L) > 0;
    bool has_residual = HAS_NORM && (IS_CARRIED || a.residual);
    uint2 other[HAS_NORM ? BLOCKS : 1] = {};
    if (HAS_NORM && !IS_CARRIED && has_residual) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            if (is_mine(i)) other[HAS_NORM ? i : 0] = load_from_l2(a.residual + column + i * 128 + lane * 4);
        }
    }
    if (L == 0) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            raw[i] = make_uint2(0, 0);
            if (is_mine(i)) raw[i] = load_from_l2(a.x + column + i * 128 + lane * 4);
        }
        if (COUNT > 1) s.launch = load_from_l2(a.launch) & 0xffff;
    } else {
        const u32 *from = a.links[L ? L - 1 : 0].results + column + lane * 4;
        auto are_new = [&](const Four &f) {
            return !(((f.v[0] ^ s.launch) | (f.v[1] ^ s.launch) | (f.v[2] ^ s.launch) | (f.v[3] ^ s.launch)) & 0xffff);
        };
        if (lane == 0 && column < N_IN) {  // at first only one lane waits, for the sake of bandwidth
            while (!are_new(load_results(from))) {
            }
        }
        __syncwarp();
#pragma unroll
        for (int first = 0; first < BLOCKS; first += 8) {  // 8 at a time, for the sake of registers
            u32 missing = 0;
#pragma unroll
            for (int i = first; i < min(first + 8, BLOCKS); i++) {
                raw[i] = make_uint2(0, 0);
                missing |= is_mine(i) ? 1u << (i - first) : 0;
            }
            while (missing) {
                Four got[8];
#pragma unroll
                for (int i = first; i < min(first + 8, BLOCKS); i++) {
                    if (missing >> (i - first) & 1) got[i - first] = load_results(from + i * 128);
                }
#pragma unroll
                for (int i = first; i < min(first + 8, BLOCKS); i++) {
                    const u32 *v = got[i - first].v;
                    if (missing >> (i - first) & 1 && are_new(got[i - first])) {
                        raw[i] = make_uint2(v[0] >> 16 | (v[1] & 0xffff0000), v[2] >> 16 | (v[3] & 0xffff0000));
                        missing &= ~(1u << (i - first));
                    }
                }
            }
        }
        __syncwarp();
    }
    if (has_residual) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            uint2 more = IS_CARRIED ? s.total[i] : other[HAS_NORM ? i : 0];
            u32 total[4];
            for (int j = 0; j < 4; j++)
                total[j] = narrow(widen<IS_HALF>(half_of(raw[i], j)) + widen<IS_HALF>(half_of(more, j)));
            raw[i] = make_uint2(total[0] | total[1] << 16, total[2] | total[3] << 16);
            if (blockIdx.x == 0 && is_mine(i)) *(uint2 *)(link.total + column + i * 128 + lane * 4) = raw[i];
        }
    }
    if (HAS_NORM) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) s.total[i] = raw[i];
    }
    float square = 0.0f, factor = 1.0f;  // this warp's sums are multiplied by `factor`
    u32 amax = 0, block_amax[BLOCKS];
    auto value = [&](int block, int j) {
        float v = widen<IS_HALF>(half_of(raw[block], j));
        return HAS_NORM ? v * widen<IS_HALF>(half_of(norm[HAS_NORM ? block : 0], j)) : v;
    };
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        block_amax[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float v = widen<IS_HALF>(half_of(raw[i], j));
            square += v * v;
            block_amax[i] = max(block_amax[i], __float_as_uint(value(i, j)) & 0x7fffffff);  // NaN > any number, as an integer
        }
        amax = max(amax, block_amax[i]);
    }
#if BITS == 4
    // In three loops, since the latency of a sum over a warp is long.
    int sums_of_groups[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) block_amax[i] = max_of_warp(block_amax[i]);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        float scale = fmaxf(__uint_as_float(block_amax[i]), 1e-30f) * (1.0f / 16256.0f);
        if (block_amax[i] > 0x7f800000) scale = __uint_as_float(block_amax[i]);
        block_amax[i] = __float_as_uint(scale);
        float up = __fdividef(1.0f, scale);
        Parts parts = split(value(i, 0) * up, value(i, 1) * up, value(i, 2) * up, value(i, 3) * up);
        sums_of_groups[i] = sum_of_bytes(parts.high) * 128 + sum_of_bytes(parts.low);
        u8 *cell = my.x + (i * 2 + lane / 16) * 128 + lane % 16 * 4;
        *(u32 *)cell = parts.high;
        *(u32 *)(cell + 64) = parts.low;
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) sums_of_groups[i] = sum_of_warp(sums_of_groups[i]);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        float scale = __uint_as_float(block_amax[i]) * choice;
        if (lane == 0) my.groups[i] = make_float2(scale / 16.0f, scale * (float)sums_of_groups[i]);
    }
#endif
    if (BITS == 8) {
        amax = max_of_warp(amax);
#if IS_FP8
        // Scale x so that its largest element is near 2^15: float16 then has enough range for the others.
        u32 exponent = max(amax >> 23, 15u);
        float up = __uint_as_float((268 - exponent) << 23);
        factor = __uint_as_float((exponent - 14) << 23);
#else
        float up = __fdividef(16256.0f, fmaxf(__uint_as_float(amax), 1e-30f));
        factor = amax > 0x7f800000 ? __uint_as_float(amax) : fmaxf(__uint_as_float(amax), 1e-30f) * (1.0f / 16256.0f);
#endif
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u8 *cell = my.x + (i * 2 + lane / 16) * 128;
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = value(i, j) * up;
            if (IS_FP8) {
                *(uint2 *)(cell + lane % 16 * 8) =
                    make_uint2(to_half(v[0]) | (u32)to_half(v[1]) << 16, to_half(v[2]) | (u32)to_half(v[3]) << 16);
            } else {
                Parts parts = split(v[0], v[1], v[2], v[3]);
                *(u32 *)(cell + lane % 16 * 4) = parts.high;
                *(u32 *)(cell + 64 + lane % 16 * 4) = parts.low;
            }
        }
    }
    factor *= choice;
    if (HAS_NORM) {
        square = sum_of_warp(square);
        if (lane == 0) s.cta.squares[warp] = square;
    }
    __syncwarp();

    // Stream the weights.
#if IS_FP8
    float sums[2][4] = {};
#elif BITS == 8
    int sums[2][4] = {};
#endif
    float low_sum = 0.0f, high_sum = 0.0f;
    int stages = (own.outputs + TILE - 1) / TILE * STEPS, slot = s.slot;
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
        load_next(a, s.cta, s.cursor, my.ring + slot * STAGE_BYTES);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (++done == STEPS) {
#if IS_FP8
            low_sum = (sums[0][0] + sums[1][0]) * factor, high_sum = (sums[0][2] + sums[1][2]) * factor;
#elif BITS == 8
            low_sum = ((float)(sums[0][0] + sums[1][0]) * 128.0f + (float)(sums[0][1] + sums[1][1])) * factor;
            high_sum = ((float)(sums[0][2] + sums[1][2]) * 128.0f + (float)(sums[0][3] + sums[1][3])) * factor;
#endif
            if (t == 0) my.sums[SUMS + row_of_tile + g] = low_sum, my.sums[SUMS + row_of_tile + g + 8] = high_sum;
            low_sum = high_sum = 0.0f;
#if BITS == 8
#pragma unroll
            for (int i = 0; i < 8; i++) sums[i / 4][i % 4] = 0;
#endif
            done = 0, row_of_tile += 16;
        }
    }
    s.slot = slot;
    wait_for_warps();

    if (has_output) {
        float norm_factor = 1.0f, result[2] = {0.0f, 0.0f};
        if (HAS_NORM) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) sum += s.cta.squares[w];
            norm_factor = rsqrtf(sum * (1.0f / N_IN) + link.eps);
        }
        for (int i = 0; i < (GATE ? 2 : 1); i++) {
            int r = GATE ? thread / 8 * 16 + thread % 8 + 8 * i : thread;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                result[i] += s.cta.warps[w].sums[SUMS + r] * (EXPERTS == 2 && BITS == 8 ? of_warp[w] : 1.0f);
            result[i] = result[i] * norm_factor * scale[i] + bias[i];
        }
        if (GATE) {
            float gate = result[0], z = gate;
            if (GATE == 2) z = fmaxf(1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate), -80.0f);
            result[0] = __fdividef(gate, 1.0f + __expf(-z)) * result[1];
        }
        if (L + 1 == COUNT)
            a.out[output] = narrow(result[0]);
        else
            store_result(link.results + output, (u32)narrow(result[0]) << 16 | s.launch);
    }
    if constexpr (L + 1 < COUNT)
        multiply<L + 1>(a, s);
    else if (COUNT > 1 && blockIdx.x == 0 && thread == 0)
        *a.launch = s.launch + 1;  // all CTAs have read it: their results were the last GEMV's x
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) gemv(const __grid_constant__ Arguments a) {
    if (EXPERTS == 1) wait_for_predecessor();  // which chooses the experts; the next kernel may read them at once
    launch_dependents();
    int thread = (int)threadIdx.x;
    if (thread >= WARPS * 32) return;  // idle warps only occupy registers
    Cta &cta = *(Cta *)shared_memory();
    set_shares(a, cta);
    wait_for_warps();
    State s = {cta, {}};
    set_link(a, cta, s.cursor);
    for (int i = 0; i < STAGES; i++) load_next(a, cta, s.cursor, cta.warps[thread / 32].ring + i * STAGE_BYTES);
    multiply<0>(a, s);
}

// GEMMs with 8-bit weights for 2 to 128 rows on Hopper: out = f(x W^T), both operands with scales of rows.
//
// A CTA computes TILE weight rows for all rows of x. One warp copies 128 columns of both operands at a time (a step)
// by TMA into a ring. Each of GROUPS warpgroups multiplies 64 weight rows, the tensor cores' M operand, by wgmma. The
// copies of weights begin before the previous kernel has ended, those of x after. With SPLIT > 1, the CTAs of a cluster
// share a tile: each has a part of the columns, and finishes a part of the rows of x with the sums of all.
//
// A sum of FP8 products by the tensor cores covers one step.
//
// Macros from the compiler's options: TILE, ROWS (of x, rounded up), PARTS (of x, see `Split` in `gemm.py`), SPLIT,
// STAGES, GATE (not 0: each 16 weight rows of a tile are 8 of gate and 8 of up), IS_HALF, IS_INT.

constexpr int GROUPS = (TILE + 63) / 64;
constexpr int COLUMNS = ROWS * PARTS, BLOCKS = COLUMNS / 8;  // of a tile of sums [weight rows, rows of x]; of 8 rows
constexpr int STAGE_BYTES = (COLUMNS + TILE) * 128;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;  // only whole warpgroups can pass on registers
constexpr int IN_FLIGHT = COLUMNS <= 64 && GROUPS <= 4 ? 2 : 1;      // steps that a warpgroup multiplies at once
// Registers per thread at the launch, and of consumers once the other threads have given up theirs.
constexpr int BOUNDS[] = {0, 256, 512, COLUMNS > 64 ? 512 : 640, 640, 768}, BOUND = BOUNDS[GROUPS];
constexpr int LAUNCHED = 65536 / BOUND / 8 * 8, FEW = 24, MANY = (LAUNCHED * THREADS - FEW * 128) / CONSUMERS / 8 * 8;

#ifdef __CUDACC__
__device__ __forceinline__ void copy_x(u32 to, const Map &map, int column, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_weight(u32 to, const Map &map, int column, int block, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(block), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ float4 load_from(int rank, u32 from) {  // another CTA's shared memory
    float4 v;
    asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at]; }"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from), "r"(rank) : "memory");
    return v;
}
#endif

// Finish and store an 8 x 8 block of each warp's outputs: this thread's for rows 2 t and 2 t + 1 of x.
__device__ __forceinline__ void store(const Arguments &a, float low, float high, int row, int column) {
    const u32 both = transpose_matrix(narrow(low, high));
    row += (int)threadIdx.x % 32 / 4, column += (int)threadIdx.x % 4 * 2;
    if (row < a.rows && column < a.n_out) *(u32 *)(a.out + (long long)row * a.n_out + column) = both;
}

// What the threads of a warp know of their two weight rows, g and g + 8 of 16.
struct Scales {
    float low, high, low_bias, high_bias;
};

__device__ __forceinline__ Scales load_scales(const Arguments &a, int column) {
    int g = (int)threadIdx.x % 32 / 4, low = column + g, high = GATE ? a.n_out + low : low + 8;
    if (low >= a.n_out) low = 0;  // the results will not be stored
    if (high >= (GATE ? 2 : 1) * a.n_out) high = 0;
    Scales s = {a.scale[low], a.scale[high], 0, 0};
    if (a.bias) s.low_bias = widen(a.bias[low]), s.high_bias = widen(a.bias[high]);
    return s;
}

// Finish block j, 8 rows of x, from its sums; `column` is the warp's first.
__device__ __forceinline__ void finish(const Arguments &a, const Scales &s, const float2 *x_scales, float4 v, int j, int column) {
    float2 x = x_scales[j * 4 + (int)threadIdx.x % 4];
    v.x = v.x * (x.x * s.low) + s.low_bias, v.y = v.y * (x.y * s.low) + s.low_bias;
    v.z = v.z * (x.x * s.high) + s.high_bias, v.w = v.w * (x.y * s.high) + s.high_bias;
    if (GATE) {
        store(a, gated(v.x, v.z), gated(v.y, v.w), j * 8, column);
    } else {
        store(a, v.x, v.y, j * 8, column);
        store(a, v.z, v.w, j * 8, column + 8);
    }
}

__device__ __forceinline__ float4 join(float4 v, float4 rest) {  // the parts of x
    constexpr float FACTOR = IS_INT ? 254 : 16;
    return {v.x + rest.x / FACTOR, v.y + rest.y / FACTOR, v.z + rest.z / FACTOR, v.w + rest.w / FACTOR};
}

// Copy steps `first` to `last`, and after the barriers the scales of x, with the first step.
__device__ __forceinline__ void copy_all(const Arguments &a, u32 ring, u32 full, u32 empty, int block, int first, int last) {
    const u64 policy = evict_first();
    const int early = min(last, first + STAGES);
    for (int i = 0; i < early - first; i++) {
        expect(full + i * 8, STAGE_BYTES + (i == 0 ? a.scale_bytes : 0));
        copy_weight(ring + i * STAGE_BYTES + COLUMNS * 128, a.weight, (first + i) * 128, block, full + i * 8, policy);
    }
    wait_for_predecessor();
    copy(empty + STAGES * 8, a.x_scale, a.scale_bytes, full);
    for (int i = 0; i < early - first; i++) copy_x(ring + i * STAGE_BYTES, a.x, (first + i) * 128, full + i * 8);
    int slot = 0, parity = 0;
    for (int step = early; step < last; step++) {
        wait(empty + slot * 8, parity);
        expect(full + slot * 8, STAGE_BYTES);
        copy_weight(ring + slot * STAGE_BYTES + COLUMNS * 128, a.weight, step * 128, block, full + slot * 8, policy);
        copy_x(ring + slot * STAGE_BYTES, a.x, step * 128, full + slot * 8);
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(BOUND, 1) gemm(const __grid_constant__ Arguments a) {
    u8 *const shared = shared_memory();
    const u32 ring = (address(shared) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES;
    const u32 empty = full + STAGES * 8;
    const int thread = (int)threadIdx.x, rank = (int)blockIdx.x % SPLIT, tile = (int)blockIdx.x / SPLIT;
    const int first = a.pairs * rank / SPLIT * 2, last = a.pairs * (rank + 1) / SPLIT * 2;
    launch_dependents();
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(full + i * 8, 1), init_barrier(empty + i * 8, CONSUMERS / 32);
        fence_barriers();
    }
    __syncthreads();
    if (thread >= CONSUMERS) {
        if (GROUPS > 1) give_up_registers<FEW>();
        if (thread == CONSUMERS) copy_all(a, ring, full, empty, tile * (TILE / (GATE ? 16 : 8)), first, last);
        if (SPLIT > 1) {
            __syncwarp();
            synchronize_cluster();  // as the others do
        }
    } else {
        if (GROUPS > 1) take_registers<MANY>();
        const int column = (tile * TILE + thread / 32 * 16) / (GATE ? 2 : 1);
        const Scales scales = load_scales(a, column);
        Sums totals[BLOCKS], found[IN_FLIGHT][BLOCKS];
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) totals[j] = {0, 0, 0, 0};
        int slot = 0, parity = 0, done = 0;
        for (int step = first; step < last; step += IN_FLIGHT) {
#pragma unroll
            for (int f = 0; f < IN_FLIGHT; f++) {
                const u32 stage = ring + slot * STAGE_BYTES;
                const u64 w = matrix_at(stage + (COLUMNS + thread / 128 * 64) * 128), x = matrix_at(stage);
                wait(full + slot * 8, parity);
                begin_products();
#pragma unroll
                for (int k = 0; k < 4; k++) multiply(IS_INT ? totals : found[f], w + 2 * k, x + 2 * k, IS_INT || k);
                commit_products();
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
#pragma unroll
            for (int f = 0; f < IN_FLIGHT; f++) {
                f + 1 < IN_FLIGHT ? wait_for_products<1>() : wait_for_products<0>();
                if (thread % 32 == 0) arrive(empty + done * 8);
                if (++done == STAGES) done = 0;
#pragma unroll
                for (int j = 0; j < BLOCKS && !IS_INT; j++) {
                    totals[j].x += found[f][j].x, totals[j].y += found[f][j].y;
                    totals[j].z += found[f][j].z, totals[j].w += found[f][j].w;
                }
            }
        }
        float4 sums[BLOCKS];
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) sums[j] = {(float)totals[j].x, (float)totals[j].y, (float)totals[j].z, (float)totals[j].w};
#pragma unroll
        for (int j = 0; PARTS == 2 && j < ROWS / 8; j++) sums[j] = join(sums[j], sums[(ROWS / 8 + j) % BLOCKS]);
        const bool has_outputs = thread / 32 * 16 < TILE;
        const float2 *const x_scales = (const float2 *)(shared + (empty + STAGES * 8 - address(shared)));
        wait_for_predecessor();
        if (SPLIT == 1) {
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++)
                if (has_outputs) finish(a, scales, x_scales, sums[j], j, column);
        } else {  // all copies have been read, so the ring is free for sums
            float4 *const own = (float4 *)(shared + (ring - address(shared))) + thread;
            wait_for_threads(1, CONSUMERS);
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) own[j * CONSUMERS] = sums[j];
            synchronize_cluster();
            for (int j = ROWS / 8 * rank / SPLIT; j < ROWS / 8 * (rank + 1) / SPLIT; j++) {
                float4 total = {0, 0, 0, 0};
#pragma unroll
                for (int r = 0; r < SPLIT; r++) {
                    const float4 v = load_from(r, ring + (j * CONSUMERS + thread) * 16);
                    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
                }
                if (has_outputs) finish(a, scales, x_scales, total, j, column);
            }
        }
    }
    if (SPLIT > 1) wait_for_cluster();  // no CTA still reads another's sums
}

// Grouped GEMMs with MXFP4 weights on Hopper, for pairs sorted by expert (see `moe_routing.py`): out = f(x W^T + bias).
//
// Weights are the tensor cores' left operand, in registers: widened to bfloat16 with their scales, they are exact, and so
// is x. A CTA computes tiles of TILE weight rows of an expert by up to COLUMNS of its pairs, one after the other, so its
// copies of the next tile begin while it finishes one. With a gate, half of a tile's rows are gate, and the others up.
//
// A chunk of 64 inputs is 32 bytes, of which byte i has input i in its low half and 32 + i in its high one. So a thread
// that loads four bytes finds inputs 0 and 2, and 1 and 3, in places of the same kind. They are the neighbours of a
// fragment if x has the even inputs of each 16 before the odd ones, which `gather` and the results of a gate have.
//
// Macros from the compiler's options: COLUMNS, TILE, GROUPS (warpgroups that multiply), STAGES (of four chunks of weights),
// X_STAGES (of X_CHUNKS chunks of x), CTAS (per SM), GATE.

constexpr int SUBS = TILE / GROUPS / 64, BLOCKS = COLUMNS / 8, HALVES = GATE ? 2 : 1;
constexpr int OUTPUTS = TILE / HALVES, SUB_OUTPUTS = 64 / HALVES;  // of a tile, and of 64 of its rows
constexpr int CHUNKS = 4, STAGE_BYTES = TILE * 128, X_BYTES = COLUMNS * 128 * X_CHUNKS;
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + (SUBS > 1 ? 128 : 32);
constexpr int SHIFT = 64;  // a weight is 2^SHIFT times smaller, so that its scale is a positive float

struct Mixture {
    Map x, weight;
    const u8 *scale;
    const u16 *bias;
    u16 *out;
    const int *order, *tiles;
    int n_out, chunks;
};

#ifdef __CUDACC__
__device__ __forceinline__ void copy_box(u32 to, const Map &map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const Map &map, int column, int row, int expert, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(0), "r"(expert), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ u32 multiply_bfloats(u32 a, u32 b) {
    asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));  // stays before the products: else these wait for one another
    return a;
}
#endif

struct Ring {
    u32 slots, full, empty;
    int slot = 0, parity = 0;
    template <int SIZE>
    __device__ __forceinline__ void advance() {
        if (++slot == SIZE) slot = 0, parity ^= 1;
    }
};

struct Tile {
    int expert, first, end, column;
};
__device__ __forceinline__ Tile tile_at(const Mixture &a, int i, int columns) {
    const int *tile = a.tiles + 4 + i / columns * 4;
    return {tile[0], tile[1], tile[2], i % columns * OUTPUTS};
}

// The weight row of an output, with a gate in the order in which x is stored.
__device__ __forceinline__ int row_of(int output) { return GATE ? output / 16 * 16 + output % 8 * 2 + output / 8 % 2 : output; }

// Two E2M1 numbers times a scale: half-bytes PLACE, 0 or 1, and PLACE + 4 of v. The product puts a copy of `seem` where the
// sign belongs, and another where the rest does: that is 2^-126 times the number, subnormal ones included.
template <int PLACE>
__device__ __forceinline__ u32 widened(u32 v, u32 scale) {
    const u32 copies = (v & 0x000f000f << 4 * PLACE) * ((4096 + 64) >> 4 * PLACE);
    return multiply_bfloats(copies & 0x81c081c0, scale);
}

__device__ __forceinline__ u32 scale_of(u32 exponent) { return exponent * 0x00800080 + (126 - SHIFT) * 0x00800080; }

// Copy all tiles of this CTA; x only after the previous kernel's end.
__device__ __forceinline__ void copy_all(const Mixture &a, Ring weights, Ring x, Ring scales, int columns, int count) {
    const u64 policy = evict_first();
    const int groups = a.chunks * 2;
    int held = 0;  // chunks whose x is not copied yet
    bool has_waited = false;
    for (int i = (int)blockIdx.x; i < count; i += (int)gridDim.x) {
        const Tile tile = tile_at(a, i, columns);
        const int bytes = min(OUTPUTS, a.n_out - tile.column) * groups;
        wait(scales.empty + scales.slot * 8, scales.parity ^ 1);
        expect(scales.full + scales.slot * 8, bytes * HALVES);
        for (int half = 0; half < HALVES; half++) {
            const long long row = ((long long)tile.expert * HALVES + half) * a.n_out + tile.column;
            copy(scales.slots + (scales.slot * TILE + half * OUTPUTS) * groups, a.scale + row * groups, bytes, scales.full + scales.slot * 8);
        }
        scales.advance<2>();
        for (int chunk = 0; chunk < a.chunks; chunk += X_CHUNKS) {
            if (chunk % CHUNKS == 0) {
                wait(weights.empty + weights.slot * 8, weights.parity ^ 1);
                expect(weights.full + weights.slot * 8, STAGE_BYTES);
                copy_rows(weights.slots + weights.slot * STAGE_BYTES, a.weight, chunk * 32, tile.column, tile.expert, weights.full + weights.slot * 8, policy);
                weights.advance<STAGES>();
            }
            held += X_CHUNKS;
            if (!has_waited && chunk + X_CHUNKS < min(STAGES * CHUNKS, a.chunks)) continue;
            if (!has_waited) wait_for_predecessor(), launch_dependents(), has_waited = true;
            for (; held > 0; held -= X_CHUNKS) {
                wait(x.empty + x.slot * 8, x.parity ^ 1);
                expect(x.full + x.slot * 8, X_BYTES);
                copy_box(x.slots + x.slot * X_BYTES, a.x, 0, tile.first, chunk + X_CHUNKS - held, x.full + x.slot * 8);
                x.advance<X_STAGES>();
            }
        }
    }
    if (!has_waited) wait_for_predecessor();
}

// Finish and store an 8 x 8 block of each warp's outputs: this thread's for pairs 2 t and 2 t + 1.
__device__ __forceinline__ void store(const Mixture &a, const Tile &tile, float low, float high, int pair, int output) {
    const u32 both = transpose_matrix(narrow(low, high));
    pair += tile.first + (int)threadIdx.x % 32 / 4, output += tile.column + (int)threadIdx.x % 4 * 2;
    if (pair < tile.end && output < a.n_out)
        *(u32 *)(a.out + (long long)(GATE ? pair : a.order[pair]) * a.n_out + output) = both;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) experts(const __grid_constant__ Mixture a) {
    u8 *const shared = shared_memory();
    const int thread = (int)threadIdx.x, columns = (a.n_out + OUTPUTS - 1) / OUTPUTS, groups = a.chunks * 2;
    Ring x, weights, scales;
    x.slots = (address(shared) + 1023) & ~1023u, weights.slots = x.slots + X_STAGES * X_BYTES;
    scales.slots = weights.slots + STAGES * STAGE_BYTES, x.full = scales.slots + 2 * TILE * groups;
    x.empty = x.full + X_STAGES * 8, weights.full = x.empty + X_STAGES * 8, weights.empty = weights.full + STAGES * 8;
    scales.full = weights.empty + STAGES * 8, scales.empty = scales.full + 16;
    if (thread == 0) {
        for (u32 at = x.full; at < scales.empty + 16; at += 8) {
            const bool is_empty = (at >= x.empty && at < weights.full) || (at >= weights.empty && at < scales.full) || at >= scales.empty;
            init_barrier(at, is_empty ? CONSUMERS / 32 : 1);
        }
        fence_barriers();
    }
    __syncthreads();
    // Shuffled, so that the compiler knows that all lanes have the same.
    const int count = __shfl_sync(~0u, a.tiles[0], 0) * columns, warp = __shfl_sync(~0u, thread / 32, 0);
    if (warp >= CONSUMERS / 32) {
        if (SUBS > 1) give_up_registers<24>();
        if (thread == CONSUMERS) copy_all(a, weights, x, scales, columns, count);
        return;
    }
    if (SUBS > 1) take_registers<240>();
    const int lane = thread % 32, part = warp / 4 * SUBS * SUB_OUTPUTS + warp % 4 * 16 / HALVES;  // the warp's first output
    // Rows of 16: of this lane's address for ldmatrix; g and g + 8, which its results are of.
    const int loaded = GATE ? lane / 8 % 2 * OUTPUTS + row_of(part + lane % 8) : part + lane % 16;
    const int low = row_of(part + lane / 4), high = GATE ? OUTPUTS + low : low + 8;
    const u32 loaded_at = weights.slots + loaded * 128;
    Ring x_read = x, weights_read = weights;  // what has been multiplied
    float4 sums[SUBS][BLOCKS];
    u32 left[SUBS][4][4];
    auto release = [&](int chunk, bool is_last) {
        if ((chunk + 1) % X_CHUNKS == 0 || is_last) {
            if (lane == 0) arrive(x_read.empty + x_read.slot * 8);
            x_read.advance<X_STAGES>();
        }
        if ((chunk + 1) % CHUNKS == 0 || is_last) {
            if (lane == 0) arrive(weights_read.empty + weights_read.slot * 8);
            weights_read.advance<STAGES>();
        }
    };
    for (int i = (int)blockIdx.x; i < count; i += (int)gridDim.x) {
        const Tile tile = tile_at(a, i, columns);
        float bias[SUBS][2] = {};  // loaded before it is needed
#pragma unroll
        for (int j = 0; j < SUBS * 2; j++) {
            const int row = tile.column + low + j / 2 * SUB_OUTPUTS + (GATE ? 0 : j % 2 * 8);
            const long long from = ((long long)tile.expert * HALVES + (GATE ? j % 2 : 0)) * a.n_out + row;
            if (a.bias && row < a.n_out) bias[j / 2][j % 2] = widen(a.bias[from]);
        }
#pragma unroll
        for (int j = 0; j < SUBS * BLOCKS; j++) sums[j / BLOCKS][j % BLOCKS] = {0, 0, 0, 0};
        wait(scales.full + scales.slot * 8, scales.parity);
        const u8 *const exponents = shared + (scales.slots - address(shared)) + scales.slot * TILE * groups;
        for (int first = 0;; first += CHUNKS) {
            wait(weights.full + weights.slot * 8, weights.parity);
            const u32 stage = loaded_at + weights.slot * STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int chunk = first + c;
                if (c % X_CHUNKS == 0) wait(x.full + x.slot * 8, x.parity);
                const u64 right = matrix_at(x.slots + x.slot * X_BYTES + c % X_CHUNKS * COLUMNS * 128);
                u32 packed[SUBS][4], scale[SUBS][2][2];
#pragma unroll
                for (int s = 0; s < SUBS; s++) {
                    load_matrices(packed[s], stage + s * SUB_OUTPUTS * 128 + ((c * 2 + lane / 16) ^ loaded % 8) * 16);
#pragma unroll
                    for (int r = 0; r < 2; r++) {  // rows g and g + 8
                        const u32 both = *(const u16 *)(exponents + ((r ? high : low) + s * SUB_OUTPUTS) * groups + chunk * 2);
                        scale[s][0][r] = scale_of(both & 255), scale[s][1][r] = scale_of(both >> 8);
                    }
                }
                // Before registers change that products read: the compiler does not know that these read them late.
                wait_for_products<0>();
                if (chunk > 0) release((c + CHUNKS - 1) % CHUNKS, false);
#pragma unroll
                for (int i = 0; i < SUBS * 4; i++) {
                    const int s = i / 4, j = i / 2 % 2, r = i % 2;  // j: 16 bytes
                    const u32 v = packed[s][j * 2 + r];
                    left[s][j][r] = widened<0>(v, scale[s][0][r]), left[s][j][2 + r] = widened<0>(v >> 8, scale[s][0][r]);
                    left[s][j + 2][r] = widened<1>(v, scale[s][1][r]), left[s][j + 2][2 + r] = widened<1>(v >> 8, scale[s][1][r]);
                }
                begin_products();
#pragma unroll
                for (int i = 0; i < SUBS * 4; i++) multiply_left(sums[i / 4], left[i / 4][i % 4], right + i % 4 * 2, 1);
                commit_products();
                if (c % X_CHUNKS == X_CHUNKS - 1) x.advance<X_STAGES>();
                if (chunk + 1 == a.chunks) goto multiplied;
            }
            weights.advance<STAGES>();
        }
    multiplied:
        weights.advance<STAGES>();
        if (a.chunks % X_CHUNKS) x.advance<X_STAGES>();
        wait_for_products<0>();
        release(a.chunks - 1, true);
        if (lane == 0) arrive(scales.empty + scales.slot * 8);
        scales.advance<2>();
#pragma unroll
        for (int s = 0; s < SUBS; s++) {
            const int output = part + s * SUB_OUTPUTS;
            const float b = bias[s][0], c = bias[s][1];
            constexpr float FACTOR = 18446744073709551616.f;  // 2^SHIFT
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                float4 v = sums[s][j];
                v = {v.x * FACTOR + b, v.y * FACTOR + b, v.z * FACTOR + c, v.w * FACTOR + c};
                if (GATE) {
                    store(a, tile, gated(v.x, v.z), gated(v.y, v.w), j * 8, output);
                } else {
                    store(a, tile, v.x, v.y, j * 8, output);
                    store(a, tile, v.z, v.w, j * 8, output + 8);
                }
            }
        }
    }
}

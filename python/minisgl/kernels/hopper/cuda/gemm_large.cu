// GEMMs with 8-bit weights for many rows on Hopper: out = f(x W^T), both operands with scales of rows.
//
// Pairs of CTAs, clusters, stay on their SMs and compute tiles in turn. Both have the same rows of x, of which each
// copies half by TMA to both, and other weights. In a CTA one warp copies 128 columns at a time, a step, and two
// warpgroups multiply PARTS x 64 rows each. A part of a tile is finished and stored while the next is multiplied.
//
// A sum of FP8 products by the tensor cores covers two steps. With one step, a GEMM of 8,192 rows takes 5 to 11 %
// longer: the card's power is its limit.
//
// Macros from the compiler's options: GATE, IS_HALF, IS_INT.

constexpr int PARTS = 2, ROWS = 2 * PARTS * 64, COLUMNS = 128, STAGES = 4, STAGE_BYTES = (ROWS + COLUMNS) * 128;
constexpr int BLOCKS = COLUMNS / 8, HALVES = GATE ? 2 : 1, OUTPUTS = COLUMNS / HALVES;  // of a tile's row

#ifdef __CUDACC__
__device__ __forceinline__ void copy_x(u32 to, const Map &map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(0), "r"(barrier), "h"((u16)3) : "memory");
}
__device__ __forceinline__ void copy_weight(u32 to, const Map &map, int column, int block, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(block), "r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
    asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }"
                 ::"r"(barrier), "r"(rank) : "memory");
}
#endif

struct Tile {
    int row, column;  // the first, of x and of the result
};

// Tile i of this CTA's. What runs at the same time has at most `max_rows` tiles of rows, whose x stays in L2.
__device__ __forceinline__ Tile tile_at(int i, int row_tiles, int column_tiles, int max_rows) {
    const int first = i / (max_rows * column_tiles) * max_rows, height = min(row_tiles - first, max_rows);
    i -= first * column_tiles;
    return {(first + i % height) * ROWS, (i / height * 2 + (int)blockIdx.x % 2) * OUTPUTS};
}

// Finish and store 64 rows; this thread's are `row` and `row` + 8, with the scales of x. Leaves zeros.
__device__ __forceinline__ void finish(const Arguments &a, Sums (&sums)[BLOCKS], const float2 *factors, int row, float2 x, int column) {
    column += (int)threadIdx.x % 4 * 8;
    u16 *to = a.out + (long long)row * a.n_out + column;
#pragma unroll
    for (int i = 0; i < BLOCKS; i += 4 * HALVES) {
        u32 low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 v[2];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const int block = i + j * HALVES + h;
                const float4 f = *(const float4 *)(factors + block * 8 + (int)threadIdx.x % 4 * 2);
                const Sums sum = sums[block];
                v[h] = {sum.x * (x.x * f.x) + f.y, sum.y * (x.x * f.z) + f.w, sum.z * (x.y * f.x) + f.y, sum.w * (x.y * f.z) + f.w};
                sums[block] = {0, 0, 0, 0};
            }
            if (GATE) v[0] = {gated(v[0].x, v[1].x), gated(v[0].y, v[1].y), gated(v[0].z, v[1].z), gated(v[0].w, v[1].w)};
            low[j] = narrow(v[0].x, v[0].y), high[j] = narrow(v[0].z, v[0].w);
        }
        const uint4 top = transpose({low[0], low[1], low[2], low[3]}), bottom = transpose({high[0], high[1], high[2], high[3]});
        if (row < a.rows && column < a.n_out) *(uint4 *)to = top;
        if (row + 8 < a.rows && column < a.n_out) *(uint4 *)(to + 8ll * a.n_out) = bottom;
        column += 32, to += 32;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gemm_large(const __grid_constant__ Arguments a) {
    u8 *const shared = shared_memory();
    const u32 ring = (address(shared) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES;
    const u32 empty = full + STAGES * 8;
    const int thread = (int)threadIdx.x, rank = (int)blockIdx.x % 2;
    const int row_tiles = (a.rows + ROWS - 1) / ROWS, column_tiles = (a.n_out + 2 * OUTPUTS - 1) / (2 * OUTPUTS);
    const int tiles = row_tiles * column_tiles, clusters = (int)gridDim.x / 2, max_rows = max(256 / a.pairs, 1);
    launch_dependents();
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(full + i * 8, 1), init_barrier(empty + i * 8, 16);
        fence_barriers();
    }
    synchronize_cluster();
    wait_for_predecessor();
    int slot = 0, parity = 0;
    if (thread >= 256) {
        give_up_registers<24>();
        for (int i = (int)blockIdx.x / 2; thread == 256 && i < tiles; i += clusters) {
            const Tile tile = tile_at(i, row_tiles, column_tiles, max_rows);
            for (int step = 0; step < a.pairs * 2; step++) {
                const u32 stage = ring + slot * STAGE_BYTES, half = rank * ROWS / 2;
                wait(empty + slot * 8, parity ^ 1);
                expect(full + slot * 8, STAGE_BYTES);
                copy_weight(stage + ROWS * 128, a.weight, step * 128, tile.column / 8, full + slot * 8);
                copy_x(stage + half * 128, a.x, step * 128, tile.row + half, full + slot * 8);
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        __syncwarp();
    } else {
        take_registers<240>();
        const int group = thread / 128, own_row = group * PARTS * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
        // Scales and biases of a tile's columns, for this warpgroup. Its warps are at most two pairs of steps apart.
        float2 *const factors = (float2 *)(shared + (empty + STAGES * 8 - address(shared))) + group * COLUMNS;
        Sums sums[PARTS][BLOCKS], found[BLOCKS];
        float2 factor, x_scale[PARTS];
        auto finish_part = [&](Tile tile, int p) {
            finish(a, sums[p], factors, tile.row + own_row + p * 64, x_scale[p], tile.column);
        };
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) sums[p][j] = {0, 0, 0, 0};
        Tile last = {-1, 0};
        for (int i = (int)blockIdx.x / 2; i < tiles; i += clusters) {
            const Tile tile = tile_at(i, row_tiles, column_tiles, max_rows);
            for (int pair = 0; pair < a.pairs; pair++) {
                u32 stages[2], used[2];
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    stages[s] = ring + slot * STAGE_BYTES, used[s] = empty + slot * 8;
                    wait(full + slot * 8, parity);
                    if (++slot == STAGES) slot = 0, parity ^= 1;
                }
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    begin_products();
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        const u64 x = matrix_at(stages[s] + (group * PARTS + p) * 64 * 128), w = matrix_at(stages[s] + ROWS * 128);
#pragma unroll
                        for (int k = 0; k < 4; k++) multiply(IS_INT ? sums[p] : found, x + 2 * k, w + 2 * k, IS_INT || s + k);
                        commit_products();
                    }
                    if (pair == 0 && p == 0) {
                        if (last.row >= 0) finish_part(last, PARTS - 1);
                        const int c = thread % 128, column = tile.column + (GATE ? c / 16 * 8 + c % 8 : c);
                        const int from = column + (GATE ? c / 8 % 2 * a.n_out : 0);
                        factor = {0, 0};
                        if (column < a.n_out) factor = {a.scale[from], a.bias ? widen(a.bias[from]) : 0};
#pragma unroll
                        for (int q = 0; q < PARTS; q++) {
                            const int row = tile.row + own_row + q * 64;
                            x_scale[q] = {row < a.rows ? a.x_scale[row] : 0, row + 8 < a.rows ? a.x_scale[row + 8] : 0};
                        }
                    }
                    if (pair + 1 == a.pairs && p > 0) {
                        factors[thread % 128] = factor;
                        wait_for_threads(1 + group, 128);
                        finish_part(tile, p - 1);
                    }
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        s == 0 ? wait_for_products<1>() : wait_for_products<0>();
                        if (p + 1 == PARTS && thread % 32 < 2) arrive_at(used[s], thread % 32);
                    }
#pragma unroll
                    for (int j = 0; j < BLOCKS && !IS_INT; j++) {
                        sums[p][j].x += found[j].x, sums[p][j].y += found[j].y;
                        sums[p][j].z += found[j].z, sums[p][j].w += found[j].w;
                    }
                }
            }
            last = tile;
        }
        if (last.row >= 0) finish_part(last, PARTS - 1);
    }
    synchronize_cluster();  // the other CTA may still copy to this one, or arrive at its barriers
}

// Causal attention of prompt chunks over 8-bit pages on Hopper, as `prefill_attention` in `attention_prefill.py` with
// tiles that are not split (FlashAttention-3, arXiv:2407.08608).
//
// CTAs stay on their SMs and take tiles of queries in turn. Four warps read 64 keys at a time from the pages, and write
// them as float16, scaled, to a ring. Two warpgroups multiply 64 rows of the queries' tile each. The tensor cores weigh
// the values of 64 keys while the weights of the next 64 are computed.
//
// Macros from the compiler's options: HEADS (KV heads), GROUP (query heads of each), PAGE (keys), ITEMS (where the list
// of tiles begins in `work`), MEMORY (shared, of a CTA), IS_HALF.

struct Arguments {
    Map query;  // [T, query heads and others, 256] bytes, float16
    Map pages;  // [P, 2, Hk page, 128] bytes
    const float *kv_scale;
    const int *page_table, *work;
    u16 *out;
    long long stride_scale;
    float scale;  // with log2(e)
    int stride_table, window;  // no window: 0
};

constexpr int TILE = 64, DIM = 128, QUERIES = 128 / GROUP;
constexpr int READ = 3, STAGES = 4;  // tiles of keys that are read or wait to be widened; that are widened
constexpr int TILE_BYTES = TILE * DIM, SCALE_BYTES = TILE * 4, HALF_BYTES = TILE * 128;  // of 64 dimensions in float16
constexpr int WIDENING = 128, COMPUTING = 256;  // threads
// A score that does not count, before it is scaled, and the maximum before the first tile: their difference must be large.
constexpr float MASKED = -1e38f, LOWEST = -1e29f;

// What the widening warps are told of a tile of keys.
struct Tile {
    int keys;  // up to the last that counts; none: there are no more tiles
    int head, token, is_first;  // of the queries' tile, and whether these are its first keys
};

struct Shared {  // aligned to 1,024 bytes
    u8 query[2][128 * 128];  // of 64 dimensions each, swizzled, as the next two
    u8 wide[STAGES][2][2][HALF_BYTES];  // keys, values
    u8 read[READ][2][TILE_BYTES];
    float scales[READ][2][TILE];
    Tile tiles[READ];
    u64 full[STAGES], empty[STAGES], read_full[READ], read_empty[READ], query_full, query_empty;
};

static_assert(sizeof(Shared) + 1024 <= MEMORY);

// A tile of queries.
struct Item {
    int row, begin, token, queries, head;
};

#ifdef __CUDACC__
__device__ __forceinline__ void copy_box(u32 to, const Map &map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_keys(u32 to, const Map &map, int row, int page, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(page), "r"(barrier) : "memory");
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
#endif

// The CTA's tile of queries in this round. The tiles' lengths decrease, so the order of the CTAs alternates.
__device__ __forceinline__ bool find_item(const Arguments &a, int round, Item &item) {
    const int own = (int)blockIdx.x, grid = (int)gridDim.x, i = round * grid + (round % 2 ? grid - 1 - own : own);
    if (i >= a.work[0] * HEADS) return false;
    const int *p = a.work + ITEMS + i / HEADS * 4;
    item = {p[0], p[1], p[2], p[3], i % HEADS};
    return true;
}

__device__ __forceinline__ int first_key(const Arguments &a, const Item &item) {
    return a.window ? max(item.begin + 1 - a.window, 0) / TILE * TILE : 0;
}

// Read and widen the keys and values of all of the CTA's tiles. One thread starts the copies.
__device__ __forceinline__ void widen_all(const Arguments &a, Shared &s) {
    const int thread = (int)threadIdx.x - COMPUTING;
    Item item;
    int round = 0, start = 0, end = 0, copied = 0, items = 0, page = 0;
    const int *table = a.page_table;
    auto copy_next = [&] {
        const int slot = copied % READ;
        const u32 full = address(&s.read_full[slot]);
        if (copied >= READ) wait(address(&s.read_empty[slot]), (copied / READ - 1) & 1);
        copied++;
        const bool is_first = start >= end;
        if (is_first) {
            if (!find_item(a, round++, item)) {
                s.tiles[slot].keys = 0;
                arrive(full);
                return false;
            }
            table = a.page_table + (long long)item.row * a.stride_table;
            start = first_key(a, item), end = item.begin + item.queries, page = table[start / PAGE];
        }
        const int row = item.head * PAGE + start % PAGE;
        const float *scale = a.kv_scale + page * a.stride_scale + row;
        s.tiles[slot] = {end - start, item.head, item.token, is_first};
        expect(full, 2 * TILE_BYTES + 2 * SCALE_BYTES);
        copy_keys(address(s.read[slot]), a.pages, row, page, full);
        copy(address(s.scales[slot][0]), scale, SCALE_BYTES, full);
        copy(address(s.scales[slot][1]), scale + HEADS * PAGE, SCALE_BYTES, full);
        start += TILE;
        if (start < end) page = table[start / PAGE];
        return true;
    };
    bool has_more = thread == 0;
    for (int i = 0; i < READ && has_more; i++) has_more = copy_next();
    __syncwarp();
    for (int done = 0;; done++) {
        const int slot = done % READ, stage = done % STAGES;
        wait(address(&s.read_full[slot]), done / READ & 1);
        const Tile tile = s.tiles[slot];
        if (tile.keys <= 0) return;
        if (thread == 0 && tile.is_first) {
            // Not earlier: the warpgroups need all tiles of the queries before to come to these.
            if (items) wait(address(&s.query_empty), (items - 1) & 1);
            items++;
            expect(address(&s.query_full), 2 * QUERIES * GROUP * 128);
            for (int i = 0; i < 2; i++)
                copy_box(address(s.query[i]), a.query, i * 128, tile.head * GROUP, tile.token, address(&s.query_full));
        }
        __syncwarp();
        // Eight lanes have one half of a key and the other half of the next, so that both accesses touch all banks.
        const int first = thread / 8 * 2 + thread / 4 % 2;
        uint4 v[2][4];
        float scales[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int kind = i / 4, j = i % 4, key = first + j / 2 * 32, unit = thread % 8 ^ j % 2 * 4;
            v[kind][j] = *(const uint4 *)(s.read[slot][kind] + key * DIM + (unit ^ key % 8) * 16);
            scales[kind][j] = fminf(s.scales[slot][kind][key] * 16, 146);  // as `_scaled` in `attention_prefill.py`
        }
        if (tile.keys < TILE) {  // else a NaN beyond the last key would count
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (first + i % 4 / 2 * 32 >= tile.keys) v[i / 4][i % 4] = {0, 0, 0, 0}, scales[i / 4][i % 4] = 0;
        }
        if (done >= STAGES) wait(address(&s.empty[stage]), (done / STAGES - 1) & 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int kind = i / 4, j = i % 4, key = first + j / 2 * 32, unit = thread % 8 ^ j % 2 * 4;
            const uint4 from = v[kind][j];
            const u32 factors = pack_half(scales[kind][j], scales[kind][j]);
            u8 *const row = s.wide[stage][kind][unit / 4] + key * 128;
            u32 r[8];
            widen(from.x, r[0], r[1]), widen(from.y, r[2], r[3]), widen(from.z, r[4], r[5]), widen(from.w, r[6], r[7]);
#pragma unroll
            for (int k = 0; k < 8; k++) r[k] = multiply_halves(r[k], factors);
            *(uint4 *)(row + (unit % 4 * 2 ^ key % 8) * 16) = {r[0], r[1], r[2], r[3]};
            *(uint4 *)(row + (unit % 4 * 2 + 1 ^ key % 8) * 16) = {r[4], r[5], r[6], r[7]};
        }
        fence_copies();
        __syncwarp();
        if (thread % 32 == 0) arrive(address(&s.full[stage])), arrive(address(&s.read_empty[slot]));
        if (has_more) has_more = copy_next();
        __syncwarp();
    }
}

// A warpgroup's state: of this thread's rows g and g + 8 of the warp's 16, the maximum, its share of the sum, and
// columns 8 i + 2 t and 8 i + 2 t + 1 of the output.
struct State {
    float m[2], total[2];
    float4 sums[DIM / 8];
};

// Scores x of keys from `start` on -> their weights, and the factors of all that came before.
__device__ __forceinline__ void soften(State &w, float4 (&x)[TILE / 8], float scale, int start, const int (&position)[2], int window, bool is_masked, float (&correction)[2]) {
    if (is_masked) {
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            const int key = start + i * 8 + (int)threadIdx.x % 4 * 2;
            auto mask = [&](float &v, int key, int p) {
                if (key > p || (window && key <= p - window)) v = MASKED;
            };
            mask(x[i].x, key, position[0]), mask(x[i].y, key + 1, position[0]);
            mask(x[i].z, key, position[1]), mask(x[i].w, key + 1, position[1]);
        }
    }
    float new_m[2] = {x[0].x, x[0].z};
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        new_m[0] = fmaxf(new_m[0], fmaxf(x[i].x, x[i].y));
        new_m[1] = fmaxf(new_m[1], fmaxf(x[i].z, x[i].w));
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int i = 1; i < 4; i *= 2) new_m[r] = fmaxf(new_m[r], __shfl_xor_sync(~0u, new_m[r], i));
        new_m[r] = fmaxf(new_m[r] * scale, w.m[r]);
        correction[r] = exp2_of(w.m[r] - new_m[r]);
        w.m[r] = new_m[r], w.total[r] *= correction[r];
    }
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        x[i] = {exp2_of(x[i].x * scale - new_m[0]), exp2_of(x[i].y * scale - new_m[0]),
                exp2_of(x[i].z * scale - new_m[1]), exp2_of(x[i].w * scale - new_m[1])};
        w.total[0] += x[i].x + x[i].y, w.total[1] += x[i].z + x[i].w;
    }
}

__device__ __forceinline__ void finish(const Arguments &a, const Item &item, State &w, int row) {
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        for (int i = 1; i < 4; i *= 2) w.total[r] += __shfl_xor_sync(~0u, w.total[r], i);
        f[r] = 0.0625f / w.total[r];
    }
    auto to = [&](int row) {
        const long long token = item.token + row / GROUP;
        return a.out + ((token * HEADS + item.head) * GROUP + row % GROUP) * DIM + (int)threadIdx.x % 4 * 8;
    };
    u16 *const top_to = to(row), *const bottom_to = to(row + 8);
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 4) {
        u32 low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 v = w.sums[i + j];
            low[j] = narrow(v.x * f[0], v.y * f[0]), high[j] = narrow(v.z * f[1], v.w * f[1]);
        }
        const uint4 top = transpose({low[0], low[1], low[2], low[3]}), bottom = transpose({high[0], high[1], high[2], high[3]});
        if (row / GROUP < item.queries) *(uint4 *)(top_to + i * 8) = top;
        if ((row + 8) / GROUP < item.queries) *(uint4 *)(bottom_to + i * 8) = bottom;
    }
}

__device__ __forceinline__ void compute_all(const Arguments &a, Shared &s) {
    const int lane = (int)threadIdx.x % 32, first_row = (int)threadIdx.x / 32 * 16, row = first_row + lane / 4;
    const float scale = a.scale * 0.0625f;  // keys are multiplied by 16
    State w;
    float4 x[TILE / 8];
    u32 query[DIM / 16][4], weights[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) x[i] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) w.sums[i] = {0, 0, 0, 0};
    Item item;
    int done = 0;
    for (int round = 0; find_item(a, round, item); round++) {
        const int end = item.begin + item.queries, position[2] = {item.begin + row / GROUP, item.begin + (row + 8) / GROUP};
        const int window_end = a.window ? end - a.window : 0;  // keys before it have left the window of some query
        wait(address(&s.query_full), round & 1);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            const int at = first_row + lane % 16, unit = i * 2 + lane / 16;
            load_matrices(query[i], address(s.query[unit / 8]) + at * 128 + (unit % 8 ^ at % 8) * 16);
        }
        __syncwarp();
        if (lane == 0) arrive(address(&s.query_empty));
        w.m[0] = w.m[1] = LOWEST, w.total[0] = w.total[1] = 0;
        float correction[2];
        int more = 0;
        auto begin_scores = [&] {
            wait(address(&s.full[done % STAGES]), done / STAGES & 1);
            const u64 keys = matrix_at(address(s.wide[done % STAGES][0][0]));
            begin_products();
#pragma unroll
            for (int i = 0; i < DIM / 16; i++) multiply(x, query[i], keys + i / 4 * (HALF_BYTES / 16) + i % 4 * 2, i > 0);
            commit_products();
        };
        auto begin_sums = [&](int stage) {  // of values
            const u64 values = matrix_at(address(s.wide[stage][1][0]), HALF_BYTES);
#pragma unroll
            for (int i = 0; i < TILE / 16; i++) multiply_columns(w.sums, weights[i], values + i * (16 * 128 / 16), more | i);
            commit_products();
            more = 1;
        };
        auto weigh = [&](int start) {
            const bool is_masked = start + TILE > item.begin + 1 || start < window_end;
            soften(w, x, scale, start, position, a.window, is_masked, correction);
        };
        auto pack = [&] {
#pragma unroll
            for (int i = 0; i < TILE / 16; i++) {
                const float4 low = x[2 * i], high = x[2 * i + 1];
                weights[i][0] = pack_half(low.x, low.y), weights[i][1] = pack_half(low.z, low.w);
                weights[i][2] = pack_half(high.x, high.y), weights[i][3] = pack_half(high.z, high.w);
            }
        };
        auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) arrive(address(&s.empty[stage]));
        };
        int start = first_key(a, item);
        begin_scores();
        wait_for_products<0>();
        weigh(start);
        pack();
        for (start += TILE; start < end; start += TILE) {
            const int stage = done++ % STAGES;
            begin_scores();
            begin_sums(stage);
            wait_for_products<1>();
            weigh(start);
            wait_for_products<0>();
            release(stage);
            if (!__all_sync(~0u, correction[0] == 1 && correction[1] == 1)) {
#pragma unroll
                for (int i = 0; i < DIM / 8; i++) {
                    w.sums[i].x *= correction[0], w.sums[i].y *= correction[0];
                    w.sums[i].z *= correction[1], w.sums[i].w *= correction[1];
                }
            }
            pack();
        }
        const int stage = done++ % STAGES;
        begin_products();
        begin_sums(stage);
        wait_for_products<0>();
        release(stage);
        finish(a, item, w, row);
    }
}

extern "C" __global__ void __launch_bounds__(COMPUTING + WIDENING, 1) prefill(const __grid_constant__ Arguments a) {
    Shared &s = *(Shared *)(shared_memory() + (-address(shared_memory()) & 1023));
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(address(&s.full[i]), WIDENING / 32), init_barrier(address(&s.empty[i]), COMPUTING / 32);
        for (int i = 0; i < READ; i++) init_barrier(address(&s.read_full[i]), 1), init_barrier(address(&s.read_empty[i]), WIDENING / 32);
        init_barrier(address(&s.query_full), 1), init_barrier(address(&s.query_empty), COMPUTING / 32);
        fence_barriers();
    }
    __syncthreads();
    wait_for_predecessor();
    if (threadIdx.x >= COMPUTING) {
        give_up_registers<88>();
        widen_all(a, s);
    } else {
        take_registers<208>();
        compute_all(a, s);
    }
}

// Decode attention over 8-bit pages on Hopper, as `decode_attention` in `attention_decode.py` with one query a sequence.
//
// A CTA takes the parts of one split and KV head. One warp copies tiles of 64 keys by TMA into a ring, and two compute,
// each with half of the keys of a tile. They join their results at the end of a part. Keys are the M operand of the
// tensor cores' products, and the query heads of the KV head, of which there are up to 8, are the N operand. All
// products are in float16, which represents the pages' numbers exactly.
//
// Letters of the products' fragments: a thread is g = lane / 4 and t = lane % 4.
//
// Macros from the compiler's options: HEADS (KV heads), GROUP (query heads of each), PAGE (keys), SPLITS (per KV head),
// STAGES, IS_HALF.

struct Arguments {
    Map pages;  // [P, 2, Hk page, 128] bytes
    const u16 *q;  // float16
    const float *kv_scale;
    const int *page_table;
    int *work, *counters;
    float *part, *lse;
    u16 *out;
    long long stride_scale;
    float scale;  // with log2(e)
    int stride_q, stride_table, window;  // no window: 0
};

constexpr int TILE = 64, DIM = 128, BEGINS = 8, PART = 8;
constexpr int TILE_BYTES = TILE * DIM, SCALE_BYTES = TILE * 4, QUERY_BYTES = GROUP * DIM * 2;
constexpr int WARPS = 2, KEYS = TILE / WARPS;  // that compute; keys of each
// A score that does not count, and the maximum before the first tile, whose difference must be large.
constexpr float MASKED = -1e30f, LOWEST = -1e29f;

struct Part {
    int seq, row, begin, length, first_split, parts, remaining, unused;
};

// What the computing warps are told of a tile.
struct Tile {
    int seq, head, begin, stop, length, first_split, parts, is_first;
};

struct Stage {  // aligned to 1,024 bytes
    u8 data[2][TILE_BYTES];  // keys, values
};

struct Shared {
    Stage stages[STAGES];
    float scales[STAGES][2][TILE];
    u16 query[STAGES][GROUP * DIM];
    Tile tiles[STAGES];
    u64 full[STAGES], empty[STAGES];
};

#ifdef __CUDACC__
__device__ __forceinline__ void copy_tile(u32 to, const Map &map, int row, int page, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %2, %4}], [%5], %6;"
                 ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(page), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void multiply(float4 &sums, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

#endif

__device__ __forceinline__ float max_of_keys(float v) {  // over g
    for (int i = 4; i < 32; i *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
    return v;
}
__device__ __forceinline__ float sum_of_keys(float v) {
    for (int i = 4; i < 32; i *= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

__device__ __forceinline__ Part load_part(const int *parts, int index) {
    const int4 *p = (const int4 *)(parts + index * PART);
    int4 a = p[0], b = p[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Copies all tiles of the CTA, by an EVEN plan (`plan_decode`), which has no gaps. Tiles without the newest key of their sequence are older than the predecessor.
__device__ __forceinline__ void copy_all(const Arguments &a, Shared &s) {
    const int *parts = a.work + BEGINS;
    const int split = (int)blockIdx.x / HEADS, num_splits = a.work[0], num_seqs = a.work[1];
    int head = (int)blockIdx.x % HEADS, issued = 0;
    bool has_waited = false;
    const u64 policy = evict_first();
    Part p = load_part(parts, split);
    int remaining = split < num_splits ? p.remaining : 0;
    const int first_seq = p.seq, first_head = head;
    auto query = [&](int seq, int head, int slot) {
        copy(address(s.query[slot]), a.q + (long long)seq * a.stride_q + head * GROUP * DIM, QUERY_BYTES, address(&s.full[slot]));
    };
    auto wait_once = [&] {
        if (has_waited) return;
        wait_for_predecessor();
        has_waited = true;
        if (issued) query(first_seq, first_head, 0);
    };
    while (remaining > 0) {
        const int stop = min(p.begin + remaining * TILE, p.length);
        remaining -= (stop - p.begin + TILE - 1) / TILE;
        if (p.seq + 1 >= num_seqs) remaining = 0;
        int next = SPLITS + p.seq + 1, next_head = head;
        bool has_next = remaining > 0;
        Part following = p;
        const int *table = a.page_table + (long long)p.row * a.stride_table;
        int page = table[p.begin / PAGE];
        for (int begin = p.begin; begin < stop; begin += TILE) {
            const int after = begin + TILE < stop ? table[(begin + TILE) / PAGE] : 0;
            const int slot = issued % STAGES;
            if (issued >= STAGES) {
                wait_once();
                wait(address(&s.empty[slot]), (issued / STAGES - 1) & 1);
            }
            const u32 full = address(&s.full[slot]);
            const bool is_first = begin == p.begin;
            s.tiles[slot] = {p.seq, head, begin, stop, p.length, p.first_split, p.parts, is_first};
            expect(full, 2 * TILE_BYTES + 2 * SCALE_BYTES + (is_first ? QUERY_BYTES : 0));
            if (begin + TILE >= p.length || (is_first && issued)) wait_once();
            const int row = head * PAGE + begin % PAGE;
            const float *scale = a.kv_scale + page * a.stride_scale + row;
            copy_tile(address(s.stages[slot].data), a.pages, row, page, full, policy);
            copy(address(s.scales[slot][0]), scale, SCALE_BYTES, full);
            copy(address(s.scales[slot][1]), scale + HEADS * PAGE, SCALE_BYTES, full);
            if (is_first && has_waited) query(p.seq, head, slot);
            issued++;
            page = after;
            if (!is_first) continue;
            if (num_splits > SPLITS) {  // every layer draws one ticket per split and KV head
                wait_once();
                const int ticket = (int)(atomicAdd((u32 *)a.work + 3, 1u) % (u32)(num_splits * HEADS));
                next = SPLITS + ticket / HEADS, next_head = ticket % HEADS, has_next = next < num_splits;
            }
            if (has_next) following = load_part(parts, next);
        }
        p = following;
        if (num_splits > SPLITS) head = next_head, remaining = has_next ? p.remaining : 0;
    }
    wait_once();
    const int slot = issued % STAGES;
    if (issued >= STAGES) wait(address(&s.empty[slot]), (issued / STAGES - 1) & 1);
    s.tiles[slot].seq = -1;
    arrive(address(&s.full[slot]));
}

// Merge the parts of one sequence and KV head, weighted by their exponential sums.
__device__ __forceinline__ void merge(const Arguments &a, const Tile &tile, int lane) {
    const long long first = ((long long)(tile.seq + tile.first_split) * HEADS + tile.head) * GROUP;
    u16 *out = a.out + ((long long)tile.seq * HEADS + tile.head) * GROUP * DIM;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float m = LOWEST, total = 0;
        float4 sum = {0, 0, 0, 0};
#pragma unroll 4
        for (int j = 0; j < tile.parts; j++) {
            const long long at = first + h + (long long)j * HEADS * GROUP;
            const float lse = __ldcg(a.lse + at);
            const float4 x = __ldcg((const float4 *)(a.part + at * DIM) + lane);
            const float new_m = fmaxf(m, lse), c = exp2_of(m - new_m), p = exp2_of(lse - new_m);
            total = total * c + p, m = new_m;
            sum = {sum.x * c + x.x * p, sum.y * c + x.y * p, sum.z * c + x.z * p, sum.w * c + x.w * p};
        }
        const float f = 1 / total;
        *(uint2 *)(out + h * DIM + lane * 4) = {narrow(sum.x * f, sum.y * f), narrow(sum.z * f, sum.w * f)};
    }
}

// A warp's state: of two query heads, 2 t and 2 t + 1, the maximum, this thread's share of the sum, and the output's
// dimensions 16 i + 2 g and 16 i + 2 g + 1: the first of both heads, then the second.
struct State {
    float m[2], total[2];
    float4 sums[DIM / 16];
};

__device__ __forceinline__ void scale_by(float4 &v, float first, float second) {
    v.x *= first, v.y *= second, v.z *= first, v.w *= second;
}

// Add the other warp's state, which is in its half of the stage.
__device__ __forceinline__ void join(State &w, const Stage &stage, int lane) {
    const float4 other = *(const float4 *)(stage.data[1] + KEYS * DIM + lane * 16);
    const float m[2] = {other.x, other.y}, total[2] = {other.z, other.w};
    float own[2], rest[2];
    for (int i = 0; i < 2; i++) {
        const float new_m = fmaxf(w.m[i], m[i]);
        own[i] = exp2_of(w.m[i] - new_m), rest[i] = exp2_of(m[i] - new_m);
        w.m[i] = new_m, w.total[i] = w.total[i] * own[i] + total[i] * rest[i];
    }
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        float4 v = *(const float4 *)(stage.data[0] + KEYS * DIM + (i * 32 + lane) * 16);
        scale_by(v, rest[0], rest[1]), scale_by(w.sums[i], own[0], own[1]);
        w.sums[i].x += v.x, w.sums[i].y += v.y, w.sums[i].z += v.z, w.sums[i].w += v.w;
    }
}

// Store a finished part, and merge the sequence's parts if this is the last to be finished.
__device__ __forceinline__ void finish(const Arguments &a, const Tile &tile, State &w, int lane) {
    const int g = lane / 4, t = lane % 4;
    const long long split = tile.parts > 1 ? (long long)blockIdx.x / HEADS : 0;
    const long long at = ((tile.seq + split) * HEADS + tile.head) * GROUP;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float total = sum_of_keys(w.total[i]), f = 0.00390625f / total;
        const int h = 2 * t + i;
        if (h >= GROUP) continue;
        const long long to = (at + h) * DIM + 2 * g;
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            const float low = (i ? w.sums[j].y : w.sums[j].x) * f, high = (i ? w.sums[j].w : w.sums[j].z) * f;
            if (tile.parts > 1)
                *(float2 *)(a.part + to + j * 16) = {low, high};
            else
                *(u32 *)(a.out + to + j * 16) = narrow(low, high);
        }
        if (tile.parts > 1 && g == 0) a.lse[at + h] = w.m[i] + __log2f(total);
    }
    if (tile.parts == 1) return;
    __threadfence();
    __syncwarp();
    int *const counter = a.counters + tile.seq * HEADS + tile.head;
    int before = 0;
    if (lane == 0) before = atomicAdd(counter, 1);
    if (__shfl_sync(~0u, before, 0) != tile.parts - 1) return;
    __threadfence();
    if (lane == 0) *counter = 0;
    merge(a, tile, lane);
}

__device__ __forceinline__ void compute_all(const Arguments &a, Shared &s) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, first_key = (int)threadIdx.x / 32 * KEYS;
    u32 query[DIM / 16][2];
    State w;
    for (int done = 0;; done++) {
        const int slot = done % STAGES;
        wait(address(&s.full[slot]), (done / STAGES) & 1);
        const Tile tile = s.tiles[slot];
        if (tile.seq < 0) return;
        if (tile.is_first) {
#pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                const uint2 v = *(const uint2 *)(s.query[slot] + (g < GROUP ? g : 0) * DIM + i * 16 + t * 4);
                query[i][0] = g < GROUP ? v.x : 0, query[i][1] = g < GROUP ? v.y : 0;
                w.sums[i] = {0, 0, 0, 0};
            }
            w.m[0] = w.m[1] = LOWEST, w.total[0] = w.total[1] = 0;
        }
        Stage &stage = s.stages[slot];
        const u32 keys = address(stage.data[0]) + first_key * DIM, values = address(stage.data[1]) + first_key * DIM;
        const float *k_scale = s.scales[slot][0] + first_key, *v_scale = s.scales[slot][1] + first_key;
        const int begin = tile.begin + first_key, first = a.window ? max(tile.length - a.window, 0) : 0;
        float4 x[KEYS / 16];  // keys g and g + 8 of 16, each of two heads
#pragma unroll
        for (int b = 0; b < KEYS / 16; b++) x[b] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < DIM / 16; i += 2) {
#pragma unroll
            for (int b = 0; b < KEYS / 16; b++) {
                u32 r[4], k[4];
                const int row = b * 16 + lane % 16;
                load_matrices(r, keys + row * DIM + ((i + lane / 16) ^ (row & 7)) * 16);
                widen(r[0], k[0], k[2]), widen(r[1], k[1], k[3]);
                multiply(x[b], k, query[i][0], query[i][1]);
                widen(r[2], k[0], k[2]), widen(r[3], k[1], k[3]);
                multiply(x[b], k, query[i + 1][0], query[i + 1][1]);
            }
        }
        float low[KEYS / 16], high[KEYS / 16];  // scales of values
#pragma unroll
        for (int b = 0; b < KEYS / 16; b++) {
            const float first_scale = k_scale[b * 16 + g] * a.scale, second_scale = k_scale[b * 16 + g + 8] * a.scale;
            x[b].x *= first_scale, x[b].y *= first_scale, x[b].z *= second_scale, x[b].w *= second_scale;
            low[b] = v_scale[b * 16 + g] * 256.f, high[b] = v_scale[b * 16 + g + 8] * 256.f;
        }
        if (begin + KEYS > tile.stop || begin < first) {
#pragma unroll
            for (int b = 0; b < KEYS / 16; b++) {
                const int key = begin + b * 16 + g;
                if (key >= tile.stop || key < first) x[b].x = x[b].y = MASKED;
                if (key + 8 >= tile.stop || key + 8 < first) x[b].z = x[b].w = MASKED;
                if (key >= tile.stop) low[b] = 0;
                if (key + 8 >= tile.stop) high[b] = 0;
            }
            // Else a NaN beyond the last key would count.
            for (int i = max(tile.stop - begin, 0) * 8 + lane; i < KEYS * 8; i += 32)
                *(uint4 *)(stage.data[1] + first_key * DIM + i * 16) = {0, 0, 0, 0};
            __syncwarp();
        }
        float correction[2], new_m[2] = {w.m[0], w.m[1]};
#pragma unroll
        for (int b = 0; b < KEYS / 16; b++) {
            new_m[0] = fmaxf(new_m[0], fmaxf(x[b].x, x[b].z));
            new_m[1] = fmaxf(new_m[1], fmaxf(x[b].y, x[b].w));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            new_m[i] = max_of_keys(new_m[i]);
            correction[i] = exp2_of(w.m[i] - new_m[i]);
            w.total[i] *= correction[i], w.m[i] = new_m[i];
        }
        u32 p[KEYS / 16][2];
#pragma unroll
        for (int b = 0; b < KEYS / 16; b++) {
            const float4 e = {exp2_of(x[b].x - new_m[0]), exp2_of(x[b].y - new_m[1]), exp2_of(x[b].z - new_m[0]), exp2_of(x[b].w - new_m[1])};
            w.total[0] += e.x + e.z, w.total[1] += e.y + e.w;
            p[b][0] = pack_half(e.x * low[b], e.y * low[b]), p[b][1] = pack_half(e.z * high[b], e.w * high[b]);
#pragma unroll
            for (int i = 0; i < 2; i++) p[b][i] = transpose_matrix(p[b][i]);
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            scale_by(w.sums[i], correction[0], correction[1]);
            u32 r[4], v[4];
            load_transposed(r, values + lane * DIM + (i ^ (lane & 7)) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) r[j] = __byte_perm(r[j], 0, 0x3120);  // dimension 2 g of two keys, then 2 g + 1
            widen(r[0], v[0], v[1]), widen(r[1], v[2], v[3]);
            multiply(w.sums[i], v, p[0][0], p[0][1]);
            widen(r[2], v[0], v[1]), widen(r[3], v[2], v[3]);
            multiply(w.sums[i], v, p[1][0], p[1][1]);
        }
        const bool is_last = tile.begin + TILE >= tile.stop;
        if (is_last) {
            __syncwarp();
            if (first_key > 0) {
#pragma unroll
                for (int i = 0; i < DIM / 16; i++) *(float4 *)(stage.data[0] + KEYS * DIM + (i * 32 + lane) * 16) = w.sums[i];
                *(float4 *)(stage.data[1] + KEYS * DIM + lane * 16) = {w.m[0], w.m[1], w.total[0], w.total[1]};
            }
            wait_for_threads(1, 64);
            if (first_key == 0) join(w, stage, lane);
            fence_copies();
        }
        __syncwarp();
        if (lane == 0) arrive(address(&s.empty[slot]));
        if (is_last && first_key == 0) finish(a, tile, w, lane);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 4) decode(const __grid_constant__ Arguments a) {
    Shared &s = *(Shared *)shared_memory();
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(address(&s.full[i]), 1), init_barrier(address(&s.empty[i]), WARPS);
        fence_barriers();
    }
    __syncthreads();
    if (threadIdx.x == WARPS * 32) copy_all(a, s);
    if (threadIdx.x < WARPS * 32) compute_all(a, s);
}

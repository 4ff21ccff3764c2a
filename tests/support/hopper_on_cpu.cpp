// Runs `gemm.cu`, `gemm_large.cu`, `experts.cu`, `decode.cu` or `prefill.cu` on a CPU, one cluster of CTAs after the other.
//
// A product is computed as it is begun, and a copy is done at once. So this shows wrong addresses, layouts and counts of
// barriers, but not a missing wait for a product.
#include "cuda_on_cpu.h"

struct float4 {
    float x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};

// -- CTAs and their barriers

struct Barrier {  // an mbarrier
    unsigned count, pending;
    long long bytes;
    unsigned parity;
};

struct Cta {
    __attribute__((aligned(1024))) uint8_t shared[228 << 10];
    std::map<unsigned, Barrier> barriers;
    std::map<int, Meeting> named;  // of bar.sync; 0 for all threads
    std::vector<Meeting> of_warp;
    unsigned any[32][32][6];  // what lanes give each other
    Cta** cluster;            // all of its CTAs
    Meeting* of_cluster;

    template <class Change>
    void change(unsigned barrier, Change of) {
        Barrier& b = barriers.at(barrier);
        of(b);
        if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.parity ^= 1, progress++;
    }
};
std::vector<Cta*> ctas;  // of the running cluster
Cta* own_cta() { return ctas[blockIdx.x % ctas.size()]; }

uint8_t* shared_memory() { return own_cta()->shared; }
unsigned address(const void* p) { return (unsigned)((const uint8_t*)p - own_cta()->shared); }
void launch_dependents() {}
void wait_for_predecessor() { running->has_waited = true; }
void init_barrier(unsigned barrier, unsigned count) { own_cta()->barriers[barrier] = {count, count, 0, 0}; }
void fence_barriers() {}
void arrive(unsigned barrier) {
    own_cta()->change(barrier, [](Barrier& b) { b.pending--; });
}
void arrive_at(unsigned barrier, int rank) {
    own_cta()->cluster[rank]->change(barrier, [](Barrier& b) { b.pending--; });
}
void expect(unsigned barrier, unsigned bytes) {
    own_cta()->change(barrier, [=](Barrier& b) { b.pending--, b.bytes += bytes; });
}
void wait(unsigned barrier, unsigned parity) {
    wait_until([&] { return own_cta()->barriers.at(barrier).parity != parity; });
}
void wait_for_threads(int barrier, int count) {
    own_cta()->named.try_emplace(barrier, Meeting{(unsigned)count}).first->second.meet();
}
void __syncwarp() { own_cta()->of_warp[threadIdx.x / 32].meet(); }
void synchronize_cluster() { own_cta()->of_cluster->meet(); }
void wait_for_cluster() { synchronize_cluster(); }
float4 load_from(int rank, unsigned from) {
    float4 v;
    memcpy(&v, own_cta()->cluster[rank]->shared + from, sizeof v);
    return v;
}

// -- What a warp does together

using Words = unsigned[32][6];

// What `of` returns of the words that all lanes give.
template <class T, class Of>
auto over_warp(T given, Of of) {
    static_assert(sizeof given <= sizeof(unsigned[6]));
    Words& words = own_cta()->any[threadIdx.x / 32];
    memcpy(words[threadIdx.x % 32], &given, sizeof given);
    __syncwarp();
    auto result = of(words);
    __syncwarp();
    return result;
}
template <class T>
T __shfl_sync(unsigned, T v, int lane) {
    return over_warp(v, [=](Words& words) { return bits<T>(words[lane][0]); });
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int with) { return __shfl_sync(~0u, v, threadIdx.x % 32 ^ with); }
bool __all_sync(unsigned, bool v) {
    return over_warp((int)v, [](Words& words) { return std::all_of(words, words + 32, [](auto& each) { return each[0] != 0; }); });
}
unsigned transpose_matrix(unsigned both) {
    return over_warp(both, [](Words& words) {
        unsigned result = 0;
        for (int i = 0; i < 2; i++) {
            int row = threadIdx.x % 4 * 2 + i, column = threadIdx.x % 32 / 4;
            result |= (words[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffff) << (i * 16);
        }
        return result;
    });
}

// -- Numbers

unsigned pack_half(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
unsigned pack_bfloat(float low, float high) { return to_bfloat(low) | (unsigned)to_bfloat(high) << 16; }
float exp2_of(float x) { return std::exp2(x); }
float reciprocal_of(float x) { return 1 / x; }

unsigned swizzled(unsigned at) { return at ^ (at >> 7 & 7) << 4; }  // as by TMA

// -- Registers and products, which take no time here

template <int>
void give_up_registers() {}
template <int>
void take_registers() {}
void begin_products() {}
void commit_products() {}
template <int>
void wait_for_products() { __syncwarp(); }  // before a lane tells that its warp has read a stage

#if IS_INT
int number(uint8_t v) { return (int8_t)v; }
#else
float number(uint8_t v) {
    static const std::vector<float> all = [] {
        std::vector<float> numbers;
        for (int i = 0; i < 256; i++) numbers.push_back(from_half(fp8_as_half(i)));
        return numbers;
    }();
    return all[v];
}
#endif

// The fragments of wgmma.m64nNk32 in the PTX ISA.
template <class Sums, int BLOCKS>
void multiply(Sums (&sums)[BLOCKS], unsigned long long a, unsigned long long b, int more) {
    unsigned a_at = (a & 0x3fff) << 4, b_at = (b & 0x3fff) << 4;
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    auto load = [](auto* to, unsigned at, int row) {
        for (int k = 0; k < 32; k++) to[k] = number(own_cta()->shared[swizzled(at + row * 128 + k)]);
    };
    decltype(sums[0].x) left[2][32], right[2][32];
    for (int i = 0; i < 2; i++) load(left[i], a_at, row + 8 * i);
    for (int j = 0; j < BLOCKS; j++) {
        for (int i = 0; i < 2; i++) load(right[i], b_at, 8 * j + column + i);
        decltype(&sums[j].x) to[] = {&sums[j].x, &sums[j].y, &sums[j].z, &sums[j].w};
        for (int i = 0; i < 4; i++) {
            auto total = more ? *to[i] : 0;
            for (int k = 0; k < 32; k++) total += left[i / 2][k] * right[i % 2][k];
            *to[i] = total;
        }
    }
}

// The same with k16: the left operand is in registers, and `at` tells where column n of the right has its number k.
template <auto WIDEN = from_half, int BLOCKS, class At>
void multiply_halves_with(float4 (&sums)[BLOCKS], const unsigned (&a)[4], int more, At at) {
    struct {
        unsigned v[4];
    } own = {a[0], a[1], a[2], a[3]};
    float left[2][16];
    over_warp(own, [&](Words& words) {
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++)
                left[i][k] = WIDEN(words[threadIdx.x % 32 / 4 * 4 + k % 8 / 2][k / 8 * 2 + i] >> (k % 2 * 16));
        return 0;
    });
    for (int j = 0; j < BLOCKS; j++) {
        float* to[] = {&sums[j].x, &sums[j].y, &sums[j].z, &sums[j].w};
        for (int i = 0; i < 4; i++) {
            float total = more ? *to[i] : 0;
            for (int k = 0; k < 16; k++)
                total += left[i / 2][k] * WIDEN(*(uint16_t*)(own_cta()->shared + swizzled(at(8 * j + threadIdx.x % 4 * 2 + i % 2, k))));
            *to[i] = total;
        }
    }
}
void multiply(float4 (&sums)[8], const unsigned (&a)[4], unsigned long long b, int more) {
    multiply_halves_with(sums, a, more, [=](int n, int k) { return ((b & 0x3fff) << 4) + n * 128 + k * 2; });
}
void multiply_columns(float4 (&sums)[16], const unsigned (&a)[4], unsigned long long b, int more) {
    unsigned distance = (b >> 16 & 0x3fff) << 4, rows = (b >> 32 & 0x3fff) << 4;
    multiply_halves_with(sums, a, more, [=](int n, int k) {
        return ((b & 0x3fff) << 4) + n / 64 * distance + k / 8 * rows + k % 8 * 128 + n % 64 * 2;
    });
}
float from_bfloat(uint16_t v) { return bits<float>((unsigned)v << 16); }
template <int BLOCKS>
void multiply_left(float4 (&sums)[BLOCKS], const unsigned (&a)[4], unsigned long long b, int more) {  // bfloat16
    multiply_halves_with<from_bfloat>(sums, a, more, [=](int n, int k) { return ((b & 0x3fff) << 4) + n * 128 + k * 2; });
}
unsigned multiply_bfloats(unsigned a, unsigned b) {
    return pack_bfloat(from_bfloat(a) * from_bfloat(b), from_bfloat(a >> 16) * from_bfloat(b >> 16));
}
unsigned multiply_halves(unsigned a, unsigned b) {
    return pack_half(from_half(a) * from_half(b), from_half(a >> 16) * from_half(b >> 16));
}

// The fragments of mma.m16n8k16 in the PTX ISA.
void multiply(float4& sums, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct {
        unsigned v[6];
    } own = {a[0], a[1], a[2], a[3], b0, b1};
    sums = over_warp(own, [&](Words& words) {
        float* to[] = {&sums.x, &sums.y, &sums.z, &sums.w};
        for (int i = 0; i < 4; i++) {
            int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + i % 2;
            for (int k = 0; k < 16; k++) {
                unsigned left = words[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2], right = words[column * 4 + k % 8 / 2][4 + k / 8];
                *to[i] += from_half(left >> (k % 2 * 16)) * from_half(right >> (k % 2 * 16));
            }
        }
        return sums;
    });
}
void widen(unsigned v, unsigned& low, unsigned& high) { fp8_to_half(v, low, high); }

// ldmatrix.x4: lanes 8 m to 8 m + 7 give the addresses of the rows of matrix m.
template <class Load>
void load_each(unsigned (&r)[4], unsigned at, Load load) {
    struct {
        unsigned v[4];
    } found = over_warp(at, [=](Words& words) {
        decltype(found) result;
        for (int m = 0; m < 4; m++) result.v[m] = load([&](int row) { return own_cta()->shared + words[m * 8 + row][0]; });
        return result;
    });
    memcpy(r, found.v, sizeof r);
}
void load_matrices(unsigned (&r)[4], unsigned at) {
    load_each(r, at, [](auto row) { return *(unsigned*)(row(threadIdx.x % 32 / 4) + threadIdx.x % 4 * 4); });
}
void load_transposed(unsigned (&r)[4], unsigned at) {
    load_each(r, at, [](auto row) {
        int column = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
        return ((uint16_t*)row(first))[column] | (unsigned)((uint16_t*)row(first + 1))[column] << 16;
    });
}
void fence_copies() {}
void __threadfence() {}
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
T atomicAdd(T* to, T v) { return std::atomic_ref(*to).fetch_add(v); }
float __log2f(float v) { return std::log2(v); }

#include HOPPER

// -- Copies. A map has the address, the number of dimensions, then sizes, strides from the second dimension on, and box.

void copy(u32 to, const void* from, int bytes, u32 barrier) {
    memcpy(own_cta()->shared + to, from, bytes);
    own_cta()->change(barrier, [=](Barrier& b) { b.bytes -= bytes; });
}
u64 evict_first() { return 0; }

void copy_box(Cta& into, u32 to, const Map& map, std::vector<long long> first, u32 barrier) {
    const u64 *sizes = map.words + 2, *strides = sizes + first.size(), *box = strides + first.size() - 1;
    if (map.words[1] != first.size() || to % 1024 || box[0] != 128) fail("a wrong copy");
    long long rows = 1;
    for (size_t d = 1; d < first.size(); d++) rows *= box[d];
    for (long long r = 0; r < rows; r++) {
        auto* from = (const u8*)map.words[0];
        bool is_inside = true;
        long long rest = r;
        for (size_t d = 1; d < first.size(); d++) {
            long long at = first[d] + rest % (long long)box[d];
            rest /= (long long)box[d], is_inside &= at >= 0 && at < (long long)sizes[d], from += at * (long long)strides[d - 1];
        }
        for (int i = 0; i < 128; i++) {
            bool has = is_inside && first[0] + i < (long long)sizes[0];
            into.shared[swizzled(to + r * 128 + i)] = has ? from[first[0] + i] : 0;
        }
    }
    into.change(barrier, [=](Barrier& b) { b.bytes -= rows * 128; });
}
void copy_x(u32 to, const Map& map, int column, u32 barrier) {  // of `gemm.cu`
    if (!running->has_waited) fail("x is read before the wait");
    copy_box(*own_cta(), to, map, {column, 0, 0}, barrier);
}
void copy_x(u32 to, const Map& map, int column, int row, u32 barrier) {  // of `gemm_large.cu`
    if (!running->has_waited) fail("x is read before the wait");
    for (int i = 0; i < 2; i++) copy_box(*own_cta()->cluster[i], to, map, {column, row, 0}, barrier);
}
void copy_weight(u32 to, const Map& map, int column, int block, u32 barrier, u64 = 0) {
    copy_box(*own_cta(), to, map, {column, 0, 0, block}, barrier);
}
void copy_tile(u32 to, const Map& map, int row, int page, u32 barrier, u64) {  // of `decode.cu`
    copy_box(*own_cta(), to, map, {0, row, 0, page}, barrier);
}
void copy_keys(u32 to, const Map& map, int row, int page, u32 barrier) {  // of `prefill.cu`
    copy_box(*own_cta(), to, map, {0, row, 0, page}, barrier);
}
void copy_rows(u32 to, const Map& map, int column, int row, int expert, u32 barrier, u64) {  // of `experts.cu`
    copy_box(*own_cta(), to, map, {column, row, 0, expert}, barrier);
}
void copy_box(u32 to, const Map& map, int x, int y, int z, u32 barrier) {  // of `prefill.cu` and `experts.cu`
    copy_box(*own_cta(), to, map, {x, y, z}, barrier);
}

void __syncthreads();
#ifdef WGMMA
#include WGMMA
#endif
#ifdef GEMMS
#include GEMMS
#endif
#include SOURCE

int all_threads;
void __syncthreads() { wait_for_threads(0, all_threads); }

template <class Given>
Given given_to(void (*)(Given));
extern "C" void run(const decltype(given_to(KERNEL))* arguments, int grid, int threads, int cluster) {
    gridDim.x = grid, all_threads = threads;
    for (int first = 0; first < grid; first += cluster) {
        std::vector<std::unique_ptr<Cta>> owned;
        std::vector<Thread> all(threads * cluster);
        Meeting of_cluster{(unsigned)(threads * cluster)};
        ctas.clear();
        for (int i = 0; i < cluster; i++) owned.push_back(std::make_unique<Cta>()), ctas.push_back(owned.back().get());
        for (Cta* each : ctas) {
            memset(each->shared, 0xff, sizeof each->shared);
            each->cluster = ctas.data(), each->of_cluster = &of_cluster;
            each->of_warp.resize(threads / 32, Meeting{32});
        }
        for (int i = 0; i < threads * cluster; i++) {
            all[i].thread.x = i % threads, all[i].block.x = first + i / threads;
            all[i].body = [=] { KERNEL(*arguments); };
        }
        run_threads(all);
    }
}

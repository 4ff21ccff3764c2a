// Runs `gemv.cu` on a CPU, all CTAs at once.
//
// Asynchronous copies happen when they are waited for. A read of weights beyond their end, a misaligned copy and a read
// of x before the wait for the predecessor end the process.
#include "cuda_on_cpu.h"

// -- Threads

struct Block {
    Meeting all_warps{WARPS * 32};
    std::vector<Meeting> of_warp{WARPS, Meeting{32}};
    unsigned a[32][32][4], b[32][32][2];                   // operands of the MMAs of all warps
    __attribute__((aligned(16))) char any[32][32][16];     // what lanes give each other
    __attribute__((aligned(16))) unsigned char shared[1 << 19];
};
std::vector<std::unique_ptr<Block>> blocks;
Block& own_block() { return *blocks[blockIdx.x]; }
unsigned char* shared_memory() { return own_block().shared; }
void __syncwarp() { own_block().of_warp[threadIdx.x / 32].meet(); }
void wait_for_warps() { own_block().all_warps.meet(); }

struct Copy {
    void* to;
    const void* from;
    int size;
    bool is_valid;
};
struct Own {  // of a thread
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
};
std::vector<Own> owned;
Own& own() { return owned[blockIdx.x * WARPS * 32 + threadIdx.x]; }

void launch_dependents() { running->has_waited = false; }
void wait_for_predecessor() { running->has_waited = true; }
uint2 load_from_l2(const unsigned short* from) {
    if (!running->has_waited) fail("x is read before the wait");
    return *(const uint2*)from;
}
unsigned load_from_l2(const unsigned* from) {
    if (!running->has_waited) fail("the launch's number is read before the wait");
    return *from;
}
unsigned load_choice(const void* from) { return *(const unsigned*)from; }
struct Four;
Four load_results(const unsigned* from);
void store_result(unsigned* to, unsigned v) { std::atomic_ref(*to).store(v, std::memory_order_relaxed), progress++; }

// -- Asynchronous copies

std::vector<std::pair<const uint8_t*, const uint8_t*>> weights;
extern "C" void add_weights(const uint8_t* begin, long long size) { weights.push_back({begin, begin + size}); }
bool are_weights(const uint8_t* begin, int size) {
    return std::any_of(weights.begin(), weights.end(), [&](auto& w) { return begin >= w.first && begin + size <= w.second; });
}

template <int SIZE>
void copy_async(void* to, const void* from, bool is_valid) {
    auto* begin = (const uint8_t*)from;
    if (SIZE == 16 && is_valid && !are_weights(begin, SIZE)) fail("no weights there");
    if ((uintptr_t)to % SIZE || (uintptr_t)from % SIZE) fail("a misaligned copy");
    memset(to, 0xff, SIZE);
    own().copies.push_back({to, from, SIZE, is_valid});
}
void commit() { own().groups.push_back(std::exchange(own().copies, {})); }
template <int PENDING>
void wait_for_copies() {
    auto& groups = own().groups;
    for (; groups.size() > PENDING; groups.pop_front())
        for (auto& copy : groups.front()) {
            if (copy.is_valid)
                memcpy(copy.to, copy.from, copy.size);
            else
                memset(copy.to, 0, copy.size);
        }
}

// -- What a warp does together

// The fragments of mma.m16n8k16 (16 bits) and m16n8k32 (8 bits) in the PTX ISA: PER elements in a register.
template <int PER, class T, class Element>
void mma(T* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, Element element) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    auto& a_of = own_block().a[warp];
    auto& b_of = own_block().b[warp];
    memcpy(a_of[lane], a, sizeof a), memcpy(b_of[lane], b, sizeof b);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8 * PER; k++) {
            int half = k / (4 * PER), t = k % (4 * PER) / PER;
            unsigned weight = a_of[row % 8 * 4 + t][half * 2 + row / 8];
            c[i] += element(weight, k % PER, true) * element(b_of[column * 4 + t][half], k % PER, false);
        }
    }
    __syncwarp();
}
void mma_half(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    mma<2>(c, a0, a1, a2, a3, b0, b1, [](unsigned word, int i, bool) { return from_half(word >> (16 * i)); });
}
template <bool IS_SIGNED>
void mma_bytes(int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    mma<4>(c, a0, a1, a2, a3, b0, b1, [](unsigned word, int i, bool is_weight) {
        auto byte = (uint8_t)(word >> (8 * i));
        return is_weight && !IS_SIGNED ? (int)byte : (int)(int8_t)byte;
    });
}

template <class T, class Join>
T over_warp(T v, Join join) {
    T* mine = (T*)own_block().any[threadIdx.x / 32];
    mine[threadIdx.x % 32] = v;
    __syncwarp();
    T result = mine[0];
    for (int i = 1; i < 32; i++) result = join(result, mine[i]);
    __syncwarp();
    return result;
}
unsigned max_of_warp(unsigned v) {
    return over_warp(v, [](unsigned a, unsigned b) { return max(a, b); });
}
int sum_of_warp(int v) {
    return over_warp(v, [](int a, int b) { return a + b; });
}
float sum_of_warp(float v) {
    return over_warp(v, [](float a, float b) { return a + b; });
}

#include SOURCE

Four load_results(const unsigned* from) {
    swapcontext(&running->context, &scheduler);  // until others have computed
    Four words;
    for (int i = 0; i < 4; i++) words.v[i] = std::atomic_ref(((u32*)from)[i]).load(std::memory_order_relaxed);
    return words;
}

extern "C" int shared_bytes() { return sizeof(Cta); }

extern "C" void run(const Arguments* arguments, int grid) {
    constexpr int threads = WARPS * 32;
    gridDim.x = grid;
    std::vector<Thread> all(threads * grid);
    blocks.clear(), owned.assign(threads * grid, {});
    for (int i = 0; i < grid; i++) blocks.push_back(std::make_unique<Block>()), memset(blocks[i]->shared, 0xff, sizeof blocks[i]->shared);
    for (int i = 0; i < threads * grid; i++) {
        all[i].thread.x = i % threads, all[i].block.x = i / threads;
        all[i].body = [=] { gemv(*arguments); };
    }
    run_threads(all);
}

// Runs `gemv.cu` on a CPU: a thread for each thread of all CTAs.
//
// Asynchronous copies happen when they are waited for. A read of weights beyond their end, a misaligned copy and a read
// of x before the wait for the predecessor end the process.
#include "cuda_on_cpu.h"

// -- Threads

struct Block {
    std::barrier<> all_warps{WARPS * 32};
    std::vector<std::unique_ptr<std::barrier<>>> of_warp;
    unsigned a[32][32][4], b[32][32][2];                   // operands of the MMAs of all warps
    __attribute__((aligned(16))) char any[32][32][16];     // what lanes give each other
    __attribute__((aligned(16))) unsigned char shared[1 << 19];
};
thread_local Block* block;
unsigned char* shared_memory() { return block->shared; }
void __syncwarp() { block->of_warp[threadIdx.x / 32]->arrive_and_wait(); }
void wait_for_warps() { block->all_warps.arrive_and_wait(); }

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "gemv.cu: %s\n", what);
    abort();
}

thread_local bool has_waited;
void launch_dependents() { has_waited = false; }
void wait_for_predecessor() { has_waited = true; }
uint2 load_from_l2(const unsigned short* from) {
    if (!has_waited) fail("x is read before the wait");
    return *(const uint2*)from;
}
unsigned load_from_l2(const unsigned* from) {
    if (!has_waited) fail("the launch's number is read before the wait");
    return *from;
}
unsigned load_choice(const void* from) { return *(const unsigned*)from; }
struct Four;
Four load_results(const unsigned* from);
void store_result(unsigned* to, unsigned v) { std::atomic_ref(*to).store(v, std::memory_order_relaxed); }

// -- Asynchronous copies

struct Copy {
    void* to;
    const void* from;
    int size;
    bool is_valid;
};
thread_local std::vector<Copy> copies;
thread_local std::deque<std::vector<Copy>> groups;
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
    copies.push_back({to, from, SIZE, is_valid});
}
void commit() { groups.push_back(std::exchange(copies, {})); }
template <int PENDING>
void wait_for_copies() {
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
    auto& a_of = block->a[warp];
    auto& b_of = block->b[warp];
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
    T* mine = (T*)block->any[threadIdx.x / 32];
    mine[threadIdx.x % 32] = v;
    __syncwarp();
    T result = mine[0];
    for (int i = 1; i < 32; i++) result = join(result, mine[i]);
    __syncwarp();
    return result;
}
unsigned most_of_warp(unsigned v) {
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
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // leave the processor to those that are computing
    Four words;
    for (int i = 0; i < 4; i++) words.v[i] = std::atomic_ref(((u32*)from)[i]).load(std::memory_order_relaxed);
    return words;
}

extern "C" int shared_bytes() { return sizeof(Cta); }

extern "C" void run(const Arguments* arguments, int grid) {
    gridDim.x = grid;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::jthread> threads;
    for (int i = 0; i < grid; i++) {
        blocks.push_back(std::make_unique<Block>());
        Block* own = blocks.back().get();
        memset(own->shared, 0xff, sizeof own->shared);
        for (int warp = 0; warp < WARPS; warp++) own->of_warp.push_back(std::make_unique<std::barrier<>>(32));
        for (int thread = 0; thread < WARPS * 32; thread++)
            threads.emplace_back([=] {
                threadIdx.x = thread, blockIdx.x = i, block = own;
                gemv(*arguments);
            });
    }
    threads.clear();  // joins them
}

// What the kernels in CUDA C++ need on a CPU: C++'s words for CUDA's, and conversions.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __expf std::exp
#define __fdividef(a, b) ((a) / (b))
using std::max, std::min;

struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
struct Index {
    unsigned x;
};
uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
float2 make_float2(float x, float y) { return {x, y}; }

Index gridDim;

// -- Threads: contexts of one thread of the CPU, in turn. A thread gives way where it waits.

struct Thread {
    Index thread, block;
    std::function<void()> body;
    bool is_done = false, has_waited = false;  // the latter for the predecessor
    ucontext_t context;
    std::unique_ptr<char[]> stack;
};
Thread* running;
ucontext_t scheduler;
unsigned long progress;  // of all threads, in any unit

#define threadIdx (running->thread)
#define blockIdx (running->block)

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    abort();
}

template <class Condition>
void wait_until(Condition holds) {
    while (!holds()) swapcontext(&running->context, &scheduler);
    progress++;
}

// What all of `count` threads have to reach before one goes on.
struct Meeting {
    unsigned count, arrived = 0, turn = 0;

    void meet() {
        unsigned own = turn;
        if (++arrived == count) arrived = 0, turn++, progress++;
        else wait_until([&] { return turn != own; });
    }
};

void begin_thread() {
    running->body();
    running->is_done = true;
    progress++;
    swapcontext(&running->context, &scheduler);
}

// Run threads, whose `thread`, `block` and `body` are set, to their ends.
void run_threads(std::vector<Thread>& threads) {
    constexpr size_t STACK = 1 << 18;
    for (Thread& each : threads) {
        each.stack = std::unique_ptr<char[]>(new char[STACK]);
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.get(), each.context.uc_stack.ss_size = STACK;
        makecontext(&each.context, begin_thread, 0);
    }
    for (bool is_running = true; is_running;) {
        unsigned long before = progress;
        is_running = false;
        for (Thread& each : threads) {
            if (each.is_done) continue;
            is_running = true, running = &each;
            swapcontext(&scheduler, &each.context);
        }
        if (is_running && progress == before) fail("all threads wait in vain");
    }
}

template <class A, class B>
A bits(B b) {
    static_assert(sizeof(A) == sizeof(B));
    A a;
    memcpy(&a, &b, sizeof a);
    return a;
}
float __uint_as_float(unsigned v) { return bits<float>(v); }
unsigned __float_as_uint(float v) { return bits<unsigned>(v); }
unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(both >> (selectors >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return result;
}
int sum_of_bytes(unsigned v) { return (int8_t)v + (int8_t)(v >> 8) + (int8_t)(v >> 16) + (int8_t)(v >> 24); }
float rsqrtf(float v) { return 1 / std::sqrt(v); }
float from_half(unsigned short v) { return (float)bits<_Float16>(v); }
unsigned short to_half(float f) { return bits<unsigned short>((_Float16)f); }
unsigned short to_bfloat(float f) {
    unsigned u = bits<unsigned>(f);
    return std::isnan(f) ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
unsigned short fp8_as_half(unsigned b) {
    int exponent = b >> 3 & 15, mantissa = b & 7;
    float v = exponent ? std::ldexp(1 + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
    return to_half((b & 127) == 127 ? NAN : b & 128 ? -v : v);
}
void fp8_to_half(unsigned w, unsigned& low, unsigned& high) {
    low = fp8_as_half(w & 255) | fp8_as_half(w >> 8 & 255) << 16;
    high = fp8_as_half(w >> 16 & 255) | fp8_as_half(w >> 24) << 16;
}

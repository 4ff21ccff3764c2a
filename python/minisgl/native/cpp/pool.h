// A thread pool with work stealing: each thread takes the front of its own range, then the end of others.
//
// Threads thus walk through neighbouring memory, and a descheduled thread delays the region only while the thread holds
// a piece. Results do not depend on which thread computes a piece. Waiting threads spin for microseconds, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minisgl {

// The first index of piece `i` of `pieces` in a range of `count`.
inline int64_t part(int64_t count, int pieces, int i) { return count * i / pieces; }

class Pool {
  public:
    // The caller is thread 0 of `threads`.
    explicit Pool(int threads) : ranges_(threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopped_ = true;
        }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
    }
    int size() const { return (int)ranges_.size(); }

    // Call f(piece, thread) for each piece in [0, pieces), pieces < 65,536, in parallel. One caller at a time.
    template <class F>
    void run(int pieces, const F& f) {
        if (pieces <= 1 || size() == 1) {
            for (int i = 0; i < pieces; ++i) f(i, 0);
            return;
        }
        call_ = [](const void* g, int piece, int thread) { (*(const F*)g)(piece, thread); };
        function_ = &f;
        done_.store(0, std::memory_order_relaxed);
        ++epoch_;
        for (int i = size() - 1; i >= 0; --i) {
            const uint64_t first = part(pieces, size(), i), end = part(pieces, size(), i + 1);
            ranges_[i].state.store(epoch_ << 32 | end << 16 | first);
        }
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // each thread has seen this region, or sleeps now
            wake_.notify_all();
        }
        claim(0);
        for (int spins = 0; done_.load(std::memory_order_acquire) < pieces; ++spins) relax(spins);
    }

  private:
    static constexpr int kSpins = 1000;  // about 10 ns each

    static void relax(int spins) {
        if (spins > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
    static bool is_open(uint64_t state) { return (state & 0xffff) < (state >> 16 & 0xffff); }

    // Epoch, end and next piece in one word: a claim succeeds only while its region is open.
    struct alignas(64) Range {
        std::atomic<uint64_t> state{0};
    };

    void claim(int thread) {
        for (int i = 0; i < size(); ++i) {
            std::atomic<uint64_t>& range = ranges_[(thread + i) % size()].state;
            uint64_t state = range.load();
            while (is_open(state)) {
                const uint64_t first = state & 0xffff, last = (state >> 16 & 0xffff) - 1;
                if (!range.compare_exchange_weak(state, i == 0 ? state + 1 : state - (1 << 16))) continue;
                call_(function_, (int)(i == 0 ? first : last), thread);
                done_.fetch_add(1, std::memory_order_release);
                state = range.load();
            }
        }
    }
    void serve(int thread) {
        const std::atomic<uint64_t>& own = ranges_[thread].state;
        for (int spins = 0;; ++spins) {
            if (is_open(own.load())) {
                claim(thread);
                spins = 0;
            } else if (spins < kSpins) {
                relax(0);
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return stopped_ || is_open(own.load()); });
                sleepers_.fetch_sub(1);
                if (stopped_) return;
                spins = 0;
            }
        }
    }

    std::vector<std::thread> workers_;
    std::vector<Range> ranges_;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    uint64_t epoch_ = 0;
    void (*call_)(const void*, int, int) = nullptr;
    const void* function_ = nullptr;
    bool stopped_ = false;
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace minisgl

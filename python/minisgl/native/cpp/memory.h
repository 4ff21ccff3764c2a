// Memory for intermediate results.
#pragma once
#include <new>
#include <vector>

namespace minisgl {

// Aligns a std::vector to cache lines, so that tile rows and vectors of 64 bytes do not straddle two lines.
template <class T>
struct CacheLineAllocator {
    using value_type = T;
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <class U>
    bool operator==(const CacheLineAllocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const CacheLineAllocator<U>&) const { return false; }
};
template <class T>
using Aligned = std::vector<T, CacheLineAllocator<T>>;

}  // namespace minisgl

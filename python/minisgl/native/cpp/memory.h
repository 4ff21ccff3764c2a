// Memory for what is computed in between.
#pragma once
#include <new>
#include <vector>

namespace minisgl {

// A vector that begins with a cache line: what is a line long is then one, for tiles and for vectors of 64 bytes.
template <class T>
struct Lines {
    using value_type = T;
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <class U>
    bool operator==(const Lines<U>&) const { return true; }
    template <class U>
    bool operator!=(const Lines<U>&) const { return false; }
};
template <class T>
using Aligned = std::vector<T, Lines<T>>;

}  // namespace minisgl

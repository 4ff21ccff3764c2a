// Length of the common prefix of two int32 arrays; see ../common_prefix.py.
#include <cstdint>
#include <cstring>

extern "C" int64_t minisgl_common_prefix(const int32_t* a, const int32_t* b, int64_t n) {
    constexpr int64_t kBlock = 64;  // memcmp picks the machine's vector width; a block bounds the work thrown away
    int64_t i = 0;
    while (i + kBlock <= n && std::memcmp(a + i, b + i, kBlock * sizeof(int32_t)) == 0) i += kBlock;
    while (i < n && a[i] == b[i]) ++i;
    return i;
}

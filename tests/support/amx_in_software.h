// The AMX instructions that the native step uses, in plain C++: `g++ -include` this to test their use anywhere.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define syscall(number, option, feature) (long)((number) != SYS_arch_prctl)

struct SoftTile {
    alignas(64) unsigned char row[16][64];
};
inline thread_local SoftTile soft_tile[8];
struct SoftConfig {
    unsigned char head[16];
    uint16_t row_bytes[16];
    unsigned char rows[16];
};
inline thread_local SoftConfig soft_config = {};  // all sizes 0: off

inline void soft_load(int t, const void* from, int64_t stride) {
    memset(&soft_tile[t], 0, sizeof(SoftTile));
    for (int i = 0; i < soft_config.rows[t]; ++i)
        memcpy(soft_tile[t].row[i], (const char*)from + i * stride, soft_config.row_bytes[t]);
}
inline void soft_store(int t, void* to, int64_t stride) {
    for (int i = 0; i < soft_config.rows[t]; ++i)
        memcpy((char*)to + i * stride, soft_tile[t].row[i], soft_config.row_bytes[t]);
}
inline void soft_multiply(int c, int a, int b) {
    const SoftConfig& s = soft_config;
    const bool fits = s.rows[a] == s.rows[c] && s.row_bytes[b] == s.row_bytes[c] && s.row_bytes[a] == s.rows[b] * 4;
    if (s.rows[c] == 0 || !fits) __builtin_trap();
    auto number = [](const unsigned char* p) {
        uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    };
    for (int i = 0; i < s.rows[c]; ++i)
        for (int j = 0; j < s.row_bytes[c] / 4; ++j) {
            float sum;
            memcpy(&sum, &soft_tile[c].row[i][j * 4], 4);
            for (int k = 0; k < s.rows[b]; ++k)
                for (int half = 0; half < 2; ++half)
                    sum += number(&soft_tile[a].row[i][k * 4 + half * 2]) * number(&soft_tile[b].row[k][j * 4 + half * 2]);
            memcpy(&soft_tile[c].row[i][j * 4], &sum, 4);
        }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) memcpy(&soft_config, config, sizeof(SoftConfig))
#define _tile_release() (soft_config = SoftConfig())
#define _tile_zero(t) memset(&soft_tile[t], 0, sizeof(SoftTile))
#define _tile_loadd(t, from, stride) soft_load(t, from, stride)
#define _tile_stored(t, to, stride) soft_store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) soft_multiply(c, a, b)

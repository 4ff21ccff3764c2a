// What the kernels with wgmma share; needs `hopper.cu`: clusters, registers of warpgroups, waits for products, operands.

#ifdef __CUDACC__
__device__ __forceinline__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {  // without an order of accesses to memory
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
template <int COUNT>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#endif

// A matrix of rows of 128 bytes, swizzled as by TMA. As the right operand of a product over its rows, it may have several
// parts, `distance` bytes apart, with 128 bytes of each row.
__device__ __forceinline__ u64 matrix_at(u32 address, int distance = 16) {
    return (u64)(address >> 4) | (u64)(distance >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Two columns of each of four blocks of 8, in every thread of a quad -> all columns of a block in each.
__device__ __forceinline__ uint4 transpose(uint4 v) {
    const bool odd = threadIdx.x % 2, late = threadIdx.x % 4 > 1;
    u32 r = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), s = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
    v = odd ? uint4{r, v.y, s, v.w} : uint4{v.x, r, v.z, s};
    r = __shfl_xor_sync(~0u, late ? v.x : v.z, 2), s = __shfl_xor_sync(~0u, late ? v.y : v.w, 2);
    return late ? uint4{r, s, v.z, v.w} : uint4{v.x, v.y, r, s};
}

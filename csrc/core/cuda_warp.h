// What the threads of a warp, and of a block, do together. Kernel bodies take it as a template parameter, so that tests/cpp
// can run them with the host's stand-in (tests/cpp/host_grid.h).
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

#if defined(__CUDA_ARCH__)
#define SHARDCORE_ON_DEVICE(...) __VA_ARGS__
__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t x) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(x));
}
__device__ __forceinline__ bool is_last_of(uint32_t* counter, uint32_t count) {
  __threadfence();
  const bool last = atomicInc(counter, count - 1) == count - 1;  // the last one puts 0 there
  __threadfence();
  return last;
}
#else
#define SHARDCORE_ON_DEVICE(...)  // never run: bodies on the host get the host's stand-in
#endif

struct CudaWarp {
#if defined(__CUDACC__)
  // The largest of all 32 lanes, in every lane.
  __host__ __device__ __forceinline__ uint32_t max(uint32_t x) const {
    SHARDCORE_ON_DEVICE(return __reduce_max_sync(0xffffffffu, x);)
    return x;
  }

  // The x of the lane whose number differs in the bits of mask.
  __host__ __device__ __forceinline__ double shfl_xor(double x, [[maybe_unused]] int mask) const {
    SHARDCORE_ON_DEVICE(return __shfl_xor_sync(0xffffffffu, x, mask);)
    return x;
  }

  __host__ __device__ __forceinline__ uint64_t shfl_xor(uint64_t x, [[maybe_unused]] int mask) const {
    SHARDCORE_ON_DEVICE(return __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(x), mask);)
    return x;
  }

  // The x of lane `from`.
  __host__ __device__ __forceinline__ uint32_t shfl(uint32_t x, [[maybe_unused]] int from) const {
    SHARDCORE_ON_DEVICE(return __shfl_sync(0xffffffffu, x, from);)
    return x;
  }
#endif
};

struct CudaBlock : CudaWarp {
#if defined(__CUDACC__)
  // Begins to copy 16 bytes from global to shared memory, both aligned. commit_copies ends a group of copies that the thread
  // has begun, maybe of none; wait_copies<k> waits until at most its last k groups are under way: the thread may read the
  // others.
  __host__ __device__ __forceinline__ void copy16([[maybe_unused]] void* shared, [[maybe_unused]] const void* global) const {
    SHARDCORE_ON_DEVICE(copy16_async(shared, global);)
  }
  __host__ __device__ __forceinline__ void commit_copies() const {
    SHARDCORE_ON_DEVICE(asm volatile("cp.async.commit_group;" ::: "memory");)
  }
  template <int kGroups>
  __host__ __device__ __forceinline__ void wait_copies() const {
    SHARDCORE_ON_DEVICE(asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");)
  }

  // A barrier for all threads of the block; what they wrote to shared memory is visible to all.
  __host__ __device__ __forceinline__ void sync() const { SHARDCORE_ON_DEVICE(__syncthreads();) }

  // *sum += x, in global memory, beside the same of other threads.
  __host__ __device__ __forceinline__ void add([[maybe_unused]] uint64_t* sum, [[maybe_unused]] uint64_t x) const {
    SHARDCORE_ON_DEVICE(add_to(sum, x);)
  }

  // Called by one thread of each of the grid's `count` blocks, with a counter in global memory that is 0: whether it is the
  // last. After the next barrier that one's block sees all that the callers wrote before. It leaves the counter at 0.
  __host__ __device__ __forceinline__ bool is_last([[maybe_unused]] uint32_t* counter, [[maybe_unused]] uint32_t count) const {
    SHARDCORE_ON_DEVICE(return is_last_of(counter, count);)
    return false;
  }
#endif
};

#undef SHARDCORE_ON_DEVICE

}  // namespace shardcore

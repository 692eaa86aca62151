// Reads a buffer once, 16 bytes a load, and does nothing else: what a norm can reach at most. Built by read_limit.py.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // a thread has that many in flight

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t count, uint32_t* out) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < count) {
      const uint4 v = data[at];
      bits ^= v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (bits == 0x9e3779b9u) *out = bits;  // almost never, but the compiler cannot know: the loads stay
}

}  // namespace

// data: size_bytes of device memory, a multiple of 16; out: 4 bytes of it. Returns a cudaError_t.
extern "C" int read_limit(const void* data, int64_t size_bytes, void* out, void* stream) {
  const int64_t count = size_bytes / 16;
  const int64_t blocks = (count + kThreads * kLoads - 1) / (kThreads * kLoads);
  read_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), count, static_cast<uint32_t*>(out));
  return cudaGetLastError();
}

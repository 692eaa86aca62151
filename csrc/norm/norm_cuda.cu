#include "core/cuda_check.h"
#include "norm/norm_cuda.h"
#include "norm/norm_cuda_warp.cuh"

namespace shardcore {
namespace {

// 6 blocks a multiprocessor: 40 registers, enough loads in flight.
__global__ void __launch_bounds__(kNormThreads, 6)
    sq_norm_kernel(const NormSegment* segments, const Chunk* chunks, DoubleDouble* partial) {
  const Chunk chunk = chunks[blockIdx.x];
  const NormSegment t = segments[chunk.tensor];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t last = t.numel < chunk.first + kNormChunk ? t.numel : chunk.first + kNormChunk;
  DoubleDouble total{0.0, 0.0};
  for (int64_t first = chunk.first + threadIdx.x / 32 * kBlock; first < last; first += kNormWarps * kBlock) {
    const int n = static_cast<int>(last - first < kBlock ? last - first : kBlock);
    total = dd_add(total, sq_norm_warp(load_sq_norm_lane(t.data, t.dtype, first, n, lane)));
  }
  total = add_warps(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One CUDA block.
__global__ void __launch_bounds__(kNormThreads)
    add_partials_kernel(const DoubleDouble* partial, int64_t count, DoubleDouble* out) {
  DoubleDouble total{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < count; i += kNormThreads) total = dd_add(total, partial[i]);
  for (int s = 16; s > 0; s >>= 1) {
    const DoubleDouble other{__shfl_down_sync(0xffffffffu, total.high, s), __shfl_down_sync(0xffffffffu, total.low, s)};
    total = dd_add(total, other);
  }
  total = add_warps(total);
  if (threadIdx.x == 0) *out = total;
}

}  // namespace

void sq_norm_cuda(const NormSegment* segments, const Chunk* chunks, int64_t num_chunks, DoubleDouble* partial,
                  DoubleDouble* out, cudaStream_t stream) {
  sq_norm_kernel<<<grid_size("sq_norm", num_chunks), kNormThreads, 0, stream>>>(segments, chunks, partial);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  add_partials_cuda(partial, num_chunks, out, stream);
}

void add_partials_cuda(const DoubleDouble* partial, int64_t count, DoubleDouble* out, cudaStream_t stream) {
  add_partials_kernel<<<1, kNormThreads, 0, stream>>>(partial, count, out);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

#include "core/cast_cuda.h"
#include "core/convert.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) cast_kernel(const CastSegment* segments, const Chunk* chunks) {
  const Chunk chunk = chunks[blockIdx.x];
  const CastSegment t = segments[chunk.tensor];
  const int64_t last = t.numel < chunk.first + kCastChunk ? t.numel : chunk.first + kCastChunk;
  for (int64_t i = chunk.first + threadIdx.x; i < last; i += kThreads) {
    store_from_f32(t.dst, t.dst_dtype, i, load_as_f32(t.src, t.src_dtype, i));
  }
}

}  // namespace

void cast_cuda(const CastSegment* segments, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream) {
  cast_kernel<<<grid_size("cast", num_chunks), kThreads, 0, stream>>>(segments, chunks);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

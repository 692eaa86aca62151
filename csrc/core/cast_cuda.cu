#include "core/cast_cuda.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

__global__ void __launch_bounds__(kCastThreads) cast_kernel(const CastSegment* segments, const Chunk* chunks) {
  cast_body(segments, chunks, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void cast_cuda(const CastSegment* segments, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream) {
  cast_kernel<<<grid_size("cast", num_chunks), kCastThreads, 0, stream>>>(segments, chunks);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

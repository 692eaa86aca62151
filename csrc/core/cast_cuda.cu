#include "core/cast_cuda.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

__global__ void __launch_bounds__(kCastThreads) cast_kernel(ChunkTable<CastSegment> table) {
  cast_body(table, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void cast_cuda(const ChunkTable<CastSegment>& table, int64_t num_chunks, cudaStream_t stream) {
  cast_kernel<<<grid_size("cast", num_chunks), kCastThreads, 0, stream>>>(table);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

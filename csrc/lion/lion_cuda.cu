#include "core/cuda_check.h"
#include "lion/lion_cuda.h"

namespace shardcore {
namespace {

__global__ void __launch_bounds__(kLionThreads) lion_kernel(ChunkTable<LionSegment> table, LionScalars scalars) {
  lion_body(table, scalars, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void lion_cuda(const ChunkTable<LionSegment>& table, int64_t num_chunks, const LionScalars& scalars, cudaStream_t stream) {
  lion_kernel<<<grid_size("lion", num_chunks), kLionThreads, 0, stream>>>(table, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

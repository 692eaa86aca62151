#include "adam/adam_cuda.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

__global__ void __launch_bounds__(kAdamThreads)
    adam_kernel(const AdamSegment* segments, const Chunk* chunks, const AdamScalars* scalars) {
  adam_cuda_body(segments, chunks, scalars, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalars* scalars,
               cudaStream_t stream) {
  adam_kernel<<<grid_size("adam", num_chunks), kAdamThreads, 0, stream>>>(segments, chunks, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

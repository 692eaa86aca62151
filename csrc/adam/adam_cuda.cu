#include "adam/adam_cuda.h"
#include "core/cuda_check.h"
#include "core/cuda_warp.h"

namespace shardcore {
namespace {

template <bool kReduced>
__global__ void __launch_bounds__(kAdamThreads)
    adam_kernel(const AdamSegment* segments, const Chunk* chunks, const AdamScalars* scalars) {
  adam_cuda_body<kReduced>(segments, chunks, scalars, blockIdx.x, static_cast<int>(threadIdx.x), CudaWarp{});
}

}  // namespace

void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalars* scalars, bool reduced,
               cudaStream_t stream) {
  const auto kernel = reduced ? adam_kernel<true> : adam_kernel<false>;
  kernel<<<grid_size("adam", num_chunks), kAdamThreads, 0, stream>>>(segments, chunks, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

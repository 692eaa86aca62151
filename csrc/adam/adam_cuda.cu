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

constexpr int kScalarsThreads = 128;

__global__ void __launch_bounds__(kScalarsThreads)
    device_scalars_kernel(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors, DeviceDecision decision,
                          AdamScalars* scalars) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScalarsThreads + threadIdx.x;
  if (i < num_tensors) device_scalars_body(hypers, counts, decision, i, scalars);
}

}  // namespace

void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalars* scalars, bool reduced,
               cudaStream_t stream) {
  const auto kernel = reduced ? adam_kernel<true> : adam_kernel<false>;
  kernel<<<grid_size("adam", num_chunks), kAdamThreads, 0, stream>>>(segments, chunks, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

void device_scalars_cuda(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars, cudaStream_t stream) {
  const int64_t num_blocks = (num_tensors + kScalarsThreads - 1) / kScalarsThreads;
  device_scalars_kernel<<<grid_size("adam", num_blocks), kScalarsThreads, 0, stream>>>(hypers, counts, num_tensors, decision,
                                                                                       scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

#include "adam/adam_cuda.h"
#include "core/cuda_check.h"
#include "core/cuda_warp.h"

namespace shardcore {
namespace {

constexpr int min_blocks(bool f32, bool bf16, bool q8) {
  if (f32 + bf16 + q8 > 1) return SHARDCORE_MIN_BLOCKS_ANY;
  return f32 ? SHARDCORE_MIN_BLOCKS_F32 : (bf16 ? SHARDCORE_MIN_BLOCKS_BF16 : SHARDCORE_MIN_BLOCKS_Q8);
}

template <bool kF32, bool kBf16, bool kQ8>
__global__ void __launch_bounds__(kAdamThreads, min_blocks(kF32, kBf16, kQ8))
    adam_kernel(const AdamSegment* segments, const Chunk* chunks, const AdamScalars* scalars) {
  adam_cuda_body<kF32, kBf16, kQ8>(segments, chunks, scalars, blockIdx.x, static_cast<int>(threadIdx.x), CudaWarp{});
}

constexpr int kScalarsThreads = 128;

__global__ void __launch_bounds__(kScalarsThreads)
    device_scalars_kernel(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors, DeviceDecision decision,
                          AdamScalars* scalars) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScalarsThreads + threadIdx.x;
  if (i < num_tensors) device_scalars_body(hypers, counts, decision, i, scalars);
}

}  // namespace

void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalars* scalars,
               StateDTypes states, cudaStream_t stream) {
  auto kernel = adam_kernel<true, true, true>;
  if (states == StateDTypes{true, false, false}) kernel = adam_kernel<true, false, false>;
  if (states == StateDTypes{false, true, false}) kernel = adam_kernel<false, true, false>;
  if (states == StateDTypes{false, false, true}) kernel = adam_kernel<false, false, true>;
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

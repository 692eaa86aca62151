#include "adam/adam_cuda.h"
#include "core/cuda_check.h"
#include "core/cuda_warp.h"

namespace shardcore {
namespace {

// Blocks a multiprocessor: the most that need no spills on sm_80 and sm_90 (64, 56, 72, and for mixtures up to 96 registers).
constexpr int min_blocks(bool f32, bool bf16, bool q8) { return f32 && q8 ? 5 : (q8 ? 7 : (bf16 ? 9 : 8)); }

template <bool kF32, bool kBf16, bool kQ8>
__global__ void __launch_bounds__(kAdamThreads, min_blocks(kF32, kBf16, kQ8))
    adam_kernel(const AdamSegment* segments, const Chunk* chunks, const __grid_constant__ AdamScalarsArg scalars) {
  adam_cuda_body<kF32, kBf16, kQ8>(segments, chunks, scalars, blockIdx.x, static_cast<int>(threadIdx.x), CudaWarp{});
}

__global__ void __launch_bounds__(kStepThreads)
    device_step_kernel(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, DeviceStepTerms terms,
                       DeviceStepState* state, AdamScalars* scalars) {
  __shared__ StepDecision shared;
  device_step_body(hypers, counts, num_counts, terms, state, scalars, &shared, blockIdx.x, static_cast<int>(threadIdx.x),
                   CudaBlock{});
}

}  // namespace

void adam_cuda(const AdamSegment* segments, const Chunk* chunks, int64_t num_chunks, const AdamScalarsArg& scalars,
               MomentKinds kinds, cudaStream_t stream) {
  choose_adam_body(kinds, [&](auto f32, auto bf16, auto q8) {
    constexpr auto kernel = adam_kernel<decltype(f32)::value, decltype(bf16)::value, decltype(q8)::value>;
    kernel<<<grid_size("adam", num_chunks), kAdamThreads, 0, stream>>>(segments, chunks, scalars);
  });
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

void device_step_cuda(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, const DeviceStepTerms& terms,
                      DeviceStepState* state, AdamScalars* scalars, cudaStream_t stream) {
  const int64_t num_blocks = (num_counts + kStepThreads - 1) / kStepThreads;
  device_step_kernel<<<grid_size("adam", num_blocks), kStepThreads, 0, stream>>>(hypers, counts, num_counts, terms, state,
                                                                                 scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

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

constexpr int kScalarsThreads = 128;

__global__ void __launch_bounds__(kScalarsThreads)
    device_scalars_kernel(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors, DeviceDecision decision,
                          AdamScalars* scalars) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScalarsThreads + threadIdx.x;
  if (i < num_tensors) device_scalars_body(hypers, counts, decision, i, scalars);
}

// One thread: a few hundred additions that wait for each other, in the order of the host.
__global__ void step_verdict_kernel(const DoubleDouble* squares, int64_t count, VerdictTerms terms, StepVerdict* verdict) {
  step_verdict_body(squares, count, terms, verdict);
}

__global__ void __launch_bounds__(kScalarsThreads)
    verdict_scalars_kernel(const VerdictHyper* hypers, int64_t num_hypers, const StepVerdict* verdict, AdamScalars* scalars) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScalarsThreads + threadIdx.x;
  if (i < num_hypers) verdict_scalars_body(hypers, *verdict, i, scalars);
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

void device_scalars_cuda(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars, cudaStream_t stream) {
  const int64_t num_blocks = (num_tensors + kScalarsThreads - 1) / kScalarsThreads;
  device_scalars_kernel<<<grid_size("adam", num_blocks), kScalarsThreads, 0, stream>>>(hypers, counts, num_tensors, decision,
                                                                                       scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

void step_verdict_cuda(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms, const VerdictHyper* hypers,
                       int64_t num_hypers, StepVerdict* verdict, AdamScalars* scalars, cudaStream_t stream) {
  step_verdict_kernel<<<1, 1, 0, stream>>>(squares, count, terms, verdict);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  const int64_t num_blocks = (num_hypers + kScalarsThreads - 1) / kScalarsThreads;
  verdict_scalars_kernel<<<grid_size("adam", num_blocks), kScalarsThreads, 0, stream>>>(hypers, num_hypers, verdict, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

#include "adam/adam_cuda.h"
#include "core/cuda_check.h"
#include "core/cuda_warp.h"

namespace shardcore {
namespace {

// Blocks a multiprocessor: the most that need no spills on sm_80 and sm_90 (up to 128 registers for mixtures; 80 for 8-bit
// moments, twice 96; 56 for bfloat16 and 64 for float32 ones).
constexpr int min_blocks(int index) {
  const AdamForm form = kAdamForms[index];
  if (form.any_state) return 4;
  if (form.state == StateDType::q8 && form.any_dtypes) return 6;
  if (form.state == StateDType::q8) return form.grad == DType::f32 && form.master != Master::f32 ? 5 : 6;
  return form.state == StateDType::bf16 ? 9 : 8;
}

template <int kForm>
__global__ void __launch_bounds__(kAdamThreads, min_blocks(kForm))
    adam_kernel(const __grid_constant__ ChunkTable<AdamSegment> table, const __grid_constant__ AdamScalarsArg scalars) {
  adam_cuda_body<kForm>(table, scalars, blockIdx.x, static_cast<int>(threadIdx.x), CudaWarp{});
}

__global__ void __launch_bounds__(kStepThreads)
    device_step_kernel(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, DeviceStepTerms terms,
                       DeviceStepState* state, AdamScalars* scalars) {
  __shared__ StepDecision shared;
  device_step_body(hypers, counts, num_counts, terms, state, scalars, &shared, blockIdx.x, static_cast<int>(threadIdx.x),
                   CudaBlock{});
}

}  // namespace

void adam_cuda(const ChunkTable<AdamSegment>& table, int64_t num_chunks, const AdamScalarsArg& scalars, int form,
               cudaStream_t stream) {
  choose_adam_body(form, [&](auto index) {
    adam_kernel<decltype(index)::value><<<grid_size("adam", num_chunks), kAdamThreads, 0, stream>>>(table, scalars);
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

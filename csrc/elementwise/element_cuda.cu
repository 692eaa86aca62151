#include "core/cuda_check.h"
#include "elementwise/element_cuda.h"

namespace shardcore {
namespace {

template <bool kIsCast>
__global__ void __launch_bounds__(kElementThreads) element_kernel(ChunkTable<ElementSegment> table, ElementScalars scalars) {
  element_body<kIsCast>(table, scalars, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace

void update_elements_cuda(const ChunkTable<ElementSegment>& table, int64_t num_chunks, const ElementScalars& scalars,
                          cudaStream_t stream) {
  const auto kernel = scalars.formula == Formula::assign ? element_kernel<true> : element_kernel<false>;
  kernel<<<grid_size("element_step", num_chunks), kElementThreads, 0, stream>>>(table, scalars);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

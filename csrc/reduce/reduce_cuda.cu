#include "core/cuda_check.h"
#include "core/cuda_warp.h"
#include "norm/norm_cuda.h"
#include "reduce/reduce_cuda.h"

namespace shardcore {
namespace {

// kOrderedResident blocks a multiprocessor, each with 16 KiB of copies in flight.
__global__ void __launch_bounds__(kOrderedThreads, kOrderedResident)
    ordered_sum_kernel(const OrderedSum op, DoubleDouble* partial) {
  __shared__ OrderedShared shared;
  ordered_sum_body(op, partial, shared, blockIdx.x, static_cast<int>(threadIdx.x), CudaBlock{});
}

}  // namespace

void ordered_sum_cuda(const OrderedSum& op, DoubleDouble* partial, DoubleDouble* sq_norm, cudaStream_t stream) {
  const int64_t count = ordered_sum_grid(op.numel);
  ordered_sum_kernel<<<static_cast<unsigned>(count), kOrderedThreads, 0, stream>>>(op, partial);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  add_partials_cuda(partial, count, sq_norm, stream);
}

}  // namespace shardcore

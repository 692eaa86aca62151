#include "core/cuda_check.h"
#include "core/cuda_warp.h"
#include "norm/norm_cuda.h"

namespace shardcore {
namespace {

// 4 blocks a multiprocessor: up to 64 registers, 128 KiB of float32 loads or of copies in flight.
__global__ void __launch_bounds__(kNormThreads, 4)
    sq_norm_kernel(const __grid_constant__ NormItems items, DoubleDouble* partial) {
  __shared__ NormShared shared;
  sq_norm_body(items, partial, shared, blockIdx.x, static_cast<int>(threadIdx.x), CudaBlock{});
}

__global__ void __launch_bounds__(kSumThreads)
    add_partials_kernel(const DoubleDouble* partial, int64_t count, DoubleDouble* out) {
  __shared__ DoubleDouble shared[kSumWarps];
  add_partials_body(partial, count, out, shared, static_cast<int>(threadIdx.x), CudaBlock{});
}

}  // namespace

void sq_norm_cuda(const NormItems& items, int64_t num_chunks, DoubleDouble* partial, DoubleDouble* out, cudaStream_t stream) {
  sq_norm_kernel<<<grid_size("sq_norm", num_chunks), kNormThreads, 0, stream>>>(items, partial);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
  add_partials_cuda(partial, num_chunks, out, stream);
}

void add_partials_cuda(const DoubleDouble* partial, int64_t count, DoubleDouble* out, cudaStream_t stream) {
  add_partials_kernel<<<1, kSumThreads, 0, stream>>>(partial, count, out);
  SHARDCORE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace shardcore

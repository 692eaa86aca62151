// Every CUDA call's result is checked: SHARDCORE_CUDA_CHECK(call) throws std::runtime_error with the call and CUDA's words.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace shardcore {

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a non-sticky error must not be reported again by the next check
  const char* hint = "";
  if (error == cudaErrorNoKernelImageForDevice) {
    hint =
        "; expected a GPU of compute capability 8.0 or newer that shardcore is built for (`shardcore info` shows which; "
        "TORCH_CUDA_ARCH_LIST chooses them in a build)";
  }
  throw std::runtime_error(std::string("cuda: ") + call + " failed: " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error) + " (" + file + ":" + std::to_string(line) + ")" + hint);
}

// The number of chunks as a grid size; CUDA has at most 2^31 - 1 blocks.
inline unsigned grid_size(const char* op, int64_t num_chunks) {
  if (num_chunks > INT32_MAX) {
    throw std::invalid_argument(std::string(op) + ": the list has " + std::to_string(num_chunks) +
                                " chunks; expected at most 2147483647 (split the list)");
  }
  return static_cast<unsigned>(num_chunks);
}

#define SHARDCORE_CUDA_CHECK(call) ::shardcore::cuda_check((call), #call, __FILE__, __LINE__)

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  SHARDCORE_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace shardcore

// Every CUDA call's result is checked: SHARDCORE_CUDA_CHECK(call) throws std::runtime_error with the call and CUDA's words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace shardcore {

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a non-sticky error must not be reported again by the next check
  throw std::runtime_error(std::string("cuda: ") + call + " failed: " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error) + " (" + file + ":" + std::to_string(line) + ")");
}

}  // namespace shardcore

#define SHARDCORE_CUDA_CHECK(call) ::shardcore::cuda_check((call), #call, __FILE__, __LINE__)

// Tables of plain data on the device, and torch's current stream. Only with CUDA.
//
// Pinned memory comes from torch's caching host allocator and device memory from its caching allocator: both know the
// stream, so a table may be dropped while a kernel still reads it.
#pragma once

#ifdef SHARDCORE_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <vector>

#include "core/chunks.h"

namespace shardcore::bind {

inline cudaStream_t current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

// Copies `size_bytes` of host memory to the device in stream order; returns at once.
inline at::Tensor upload(const void* data, size_t size_bytes, at::Device device) {
  const auto size = static_cast<int64_t>(size_bytes);
  const at::Tensor pinned = at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(pinned.data_ptr(), data, size_bytes);
  return pinned.to(device, at::kByte, /*non_blocking=*/true);
}

template <typename Segment>
struct DeviceTable {
  at::Tensor segments_bytes;
  at::Tensor chunks_bytes;
  int64_t num_chunks = 0;

  DeviceTable() = default;
  DeviceTable(const std::vector<Segment>& segments, int64_t chunk_numel, at::Device device) {
    const auto count = static_cast<int64_t>(segments.size());
    const auto table = make_chunks(
        count, [&](int64_t i) { return segments[static_cast<size_t>(i)].numel; }, chunk_numel);
    num_chunks = static_cast<int64_t>(table.size());
    if (num_chunks == 0) return;
    segments_bytes = upload(segments.data(), segments.size() * sizeof(Segment), device);
    chunks_bytes = upload(table.data(), table.size() * sizeof(Chunk), device);
  }
  const Segment* segments() const { return static_cast<const Segment*>(segments_bytes.const_data_ptr()); }
  const Chunk* chunks() const { return static_cast<const Chunk*>(chunks_bytes.const_data_ptr()); }
};

}  // namespace shardcore::bind

#endif

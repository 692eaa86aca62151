// Tables of plain data on the device, and torch's current stream. Only with CUDA.
//
// Pinned memory comes from torch's caching host allocator and device memory from its caching allocator: both track the
// stream, so a table may be dropped while a kernel still reads it.
#pragma once

#ifdef SHARDCORE_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/chunks.h"
#include "core/cuda_check.h"
#include "norm/norm_cuda.h"

namespace shardcore::bind {

inline cudaStream_t current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

// Pieces of host memory that are contiguous on the device.
struct HostBytes {
  const void* data;
  size_t size_bytes;
};
using HostPieces = std::initializer_list<HostBytes>;

template <typename T>
HostBytes bytes_of(const std::vector<T>& items) {
  return {items.data(), items.size() * sizeof(T)};
}

inline size_t size_bytes_of(HostPieces pieces) {
  size_t size_bytes = 0;
  for (const HostBytes& piece : pieces) size_bytes += piece.size_bytes;
  return size_bytes;
}

// A table that a graph being captured will read: complete on return, and no part of the graph, so that replays copy nothing and
// need no host memory. The memory is not torch's: what its allocator gives during a capture belongs to the graph, whose other
// kernels may write there at every replay. Relaxed mode allows that here, as torch's own allocator does it. It is
// not known when the last graph that reads a table is destroyed, so it is kept for good (110 KiB per thousand tensors), and
// used again by a capture that needs an equal one.
inline at::Tensor table_for_graphs(HostPieces pieces, at::Device device) {
  static auto& lock = *new std::mutex;  // both outlive CUDA at exit
  static auto& kept = *new std::map<std::pair<int, std::string>, at::Tensor>;
  std::string content;
  for (const HostBytes& piece : pieces) content.append(static_cast<const char*>(piece.data), piece.size_bytes);
  const std::lock_guard<std::mutex> guard(lock);
  at::Tensor& table = kept[{device.index(), content}];
  if (table.defined()) return table;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  void* memory = nullptr;
  cudaStream_t side = nullptr;
  SHARDCORE_CUDA_CHECK(cudaMalloc(&memory, content.size()));
  SHARDCORE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  const cudaError_t copied = cudaMemcpyAsync(memory, content.data(), content.size(), cudaMemcpyHostToDevice, side);
  const cudaError_t done = cudaStreamSynchronize(side);
  cudaStreamDestroy(side);
  SHARDCORE_CUDA_CHECK(copied);
  SHARDCORE_CUDA_CHECK(done);
  table = at::for_blob(memory, {static_cast<int64_t>(content.size())})
              .target_device(device)
              .options(at::TensorOptions().dtype(at::kByte).device(device))
              .make_tensor();
  return table;
}

// Copies host memory to the device in stream order; returns at once.
inline at::Tensor upload(HostPieces pieces, at::Device device) {
  if (is_capturing(current_stream(device))) return table_for_graphs(pieces, device);
  const auto size = static_cast<int64_t>(size_bytes_of(pieces));
  const at::Tensor pinned = at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  auto* to = static_cast<char*>(pinned.data_ptr());
  for (const HostBytes& piece : pieces) {
    std::memcpy(to, piece.data, piece.size_bytes);
    to += piece.size_bytes;
  }
  return pinned.to(device, at::kByte, /*non_blocking=*/true);
}

// Segments and, behind them, their first chunks: one copy to the device for both.
template <typename Segment>
struct DeviceTable {
  static_assert(alignof(Segment) == alignof(int64_t));
  at::Tensor bytes;
  int64_t num_segments = 0;
  int64_t num_chunks = 0;

  DeviceTable() = default;
  DeviceTable(const std::vector<Segment>& segments, int64_t chunk_numel, at::Device device) {
    const std::vector<int64_t> first_chunks = first_chunks_of(segments, chunk_numel);
    num_segments = static_cast<int64_t>(segments.size());
    num_chunks = first_chunks.back();
    if (num_chunks == 0) return;
    bytes = upload({bytes_of(segments), bytes_of(first_chunks)}, device);
  }
  ChunkTable<Segment> get() const {
    const auto* const segments = static_cast<const Segment*>(bytes.const_data_ptr());
    return {segments, reinterpret_cast<const int64_t*>(segments + num_segments), static_cast<int32_t>(num_segments)};
  }
};

// The tensors of a norm: in the launch, or on the device if they are many.
struct NormTable {
  NormItems items;
  at::Tensor bytes;
  int64_t num_chunks = 0;

  NormTable() = default;
  NormTable(const std::vector<NormSegment>& segments, at::Device device) {
    const NormPlan plan(segments);
    num_chunks = plan.num_chunks;
    if (items.try_assign(plan.items)) return;
    bytes = upload({bytes_of(plan.items)}, device);
    items.table = static_cast<const NormItem*>(bytes.const_data_ptr());
    items.count = static_cast<int32_t>(plan.items.size());
  }
};

// The squared norm of the table's tensors as a float64 tensor (2,) on the device, queued on the stream.
inline at::Tensor queue_sq_norm(const NormTable& table, at::Device device, cudaStream_t stream) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  if (table.num_chunks == 0) return at::zeros({2}, options);
  const at::Tensor out = at::empty({2}, options);
  const at::Tensor partial = at::empty({table.num_chunks, 2}, options);
  sq_norm_cuda(table.items, table.num_chunks, static_cast<DoubleDouble*>(partial.data_ptr()),
               static_cast<DoubleDouble*>(out.data_ptr()), stream);
  return out;
}

}  // namespace shardcore::bind

#endif

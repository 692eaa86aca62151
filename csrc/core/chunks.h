// How one CUDA launch covers a list of tensors: CUDA block b works on chunk b, and a tensor's chunks follow one another. A row
// for each tensor says where its chunks begin, so that a table of a list has the size of the list, not of its tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "core/macros.h"

namespace shardcore {

// A list as a launch needs it; all pointers are device memory.
template <typename Segment>
struct ChunkTable {
  const Segment* segments;
  const int64_t* first_chunks;  // of each segment
  int32_t count;
};

// The number of each tensor's first chunk, and behind them that of all chunks.
template <typename Segment>
std::vector<int64_t> first_chunks_of(const std::vector<Segment>& segments, int64_t chunk_numel) {
  std::vector<int64_t> first_chunks = {0};
  first_chunks.reserve(segments.size() + 1);
  for (const Segment& t : segments) first_chunks.push_back(first_chunks.back() + (t.numel + chunk_numel - 1) / chunk_numel);
  return first_chunks;
}

struct Chunk {
  int64_t first;  // first element within the tensor, a multiple of the chunk size
  int tensor;
};

// Chunk number `index` of a table, of the last tensor that starts no later: never of an empty one. Reads of a table take long,
// so a turn reads 7 places at once; as all threads read the same, the compiler knows that they go the same way from here.
template <typename Segment>
SHARDCORE_HD Chunk chunk_at(const ChunkTable<Segment>& table, int64_t index, int64_t chunk_numel) {
  constexpr int kWays = 8;
  int tensor = 0, end = table.count;
  SHARDCORE_NO_UNROLL
  while (end - tensor > 1) {
    const int step = (end - tensor + kWays - 1) / kWays;
    int last = tensor;
    SHARDCORE_UNROLL
    for (int k = 1; k < kWays; ++k) {
      const int at = tensor + k * step;
      if (at < end && table.first_chunks[at] <= index) last = at;
    }
    tensor = last;
    end = tensor + step < end ? tensor + step : end;
  }
  int64_t first = (index - table.first_chunks[tensor]) * chunk_numel;
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(first));  // else nvcc 13.0 computes it again where it is used, and spills registers
#endif
  return {first, tensor};
}

}  // namespace shardcore

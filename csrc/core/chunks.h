// Chunk tables: how one CUDA launch covers a list of tensors. CUDA block b works on chunk b.
#pragma once

#include <cstdint>
#include <vector>

namespace shardcore {

struct Chunk {
  int64_t first;  // first element within the tensor, a multiple of the chunk size
  int64_t tensor;
};

template <typename NumelOf>
std::vector<Chunk> make_chunks(int64_t num_tensors, const NumelOf& numel_of, int64_t chunk_numel) {
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < num_tensors; ++i) {
    for (int64_t first = 0; first < numel_of(i); first += chunk_numel) chunks.push_back({first, i});
  }
  return chunks;
}

}  // namespace shardcore

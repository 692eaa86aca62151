// What one CUDA thread does in the Lion kernel, as a host/device function: tests/cpp runs it on the host.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/chunks.h"
#include "core/vector_io.h"
#include "lion/lion_math.h"

namespace shardcore {

constexpr int kLionThreads = 256;
constexpr int64_t kLionChunk = 4 * 8 * kLionThreads;

// CUDA block block_index: one chunk of one tensor.
SHARDCORE_HD void lion_body(const ChunkTable<LionSegment>& table, const LionScalars& s, int64_t block_index, int thread) {
  const Chunk chunk = chunk_at(table, block_index, kLionChunk);
  const LionSegment t = table.segments[chunk.tensor];
  const auto moved = [&](void* data, DType dtype) { return static_cast<char*>(data) + chunk.first * itemsize(dtype); };
  const char* const grad = static_cast<const char*>(t.grad) + chunk.first * itemsize(t.grad_dtype);
  char* const param = moved(t.param, t.param_dtype);
  char* const exp_avg = moved(t.exp_avg, t.state_dtype);
  const bool mastered = t.master != nullptr;
  char* const weight = mastered ? moved(t.master, DType::f32) : param;
  const DType weight_dtype = mastered ? DType::f32 : t.param_dtype;
  SHARDCORE_ASSUME_GLOBAL(grad);
  SHARDCORE_ASSUME_GLOBAL(param);
  SHARDCORE_ASSUME_GLOBAL(exp_avg);
  SHARDCORE_ASSUME_GLOBAL(weight);
  const int numel = static_cast<int>(t.numel - chunk.first < kLionChunk ? t.numel - chunk.first : kLionChunk);
  const bool aligned = is_aligned16(grad) && is_aligned16(param) && is_aligned16(exp_avg) && is_aligned16(weight);
  const int vector_numel = aligned ? numel / 8 * 8 : 0;
  const auto update = [&](auto vector, int i) {
    constexpr bool kVector = decltype(vector)::value;
    const Octet at{i, i + 4};
    float g[8], p[8], m[8];
    load_octet<kVector, true>(grad, t.grad_dtype, at, numel, g);
    load_octet<kVector>(weight, weight_dtype, at, numel, p);
    load_octet<kVector>(exp_avg, t.state_dtype, at, numel, m);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) lion_element(s, g[k], p[k], m[k]);
    store_octet<kVector>(exp_avg, t.state_dtype, at, numel, m);
    store_octet<kVector>(param, t.param_dtype, at, numel, p);
    if (mastered) store_octet<kVector>(weight, DType::f32, at, numel, p);
  };
  int i = 8 * thread;
  SHARDCORE_NO_UNROLL
  for (; i < vector_numel; i += 8 * kLionThreads) update(std::true_type{}, i);
  SHARDCORE_NO_UNROLL
  for (; i < numel; i += 8 * kLionThreads) update(std::false_type{}, i);
}

}  // namespace shardcore

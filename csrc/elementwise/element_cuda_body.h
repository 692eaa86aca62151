// What one CUDA thread does in the kernel of SGD, Adagrad, Lion and casts, as a host/device function: tests/cpp runs it on the
// host.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/chunks.h"
#include "core/vector_io.h"
#include "elementwise/element_math.h"

namespace shardcore {

constexpr int kElementThreads = 256;
constexpr int64_t kElementChunk = 4 * 8 * kElementThreads;

template <Formula kFormula>
SHARDCORE_HD void update_octet(const ElementScalars& s, const float (&g)[8], float (&p)[8], float (&state)[8]) {
  const bool l2 = s.l2 != 0.0f;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) update_element<kFormula>(s, l2, g[k], p[k], state[k]);
}

SHARDCORE_HD void update_octet(const ElementScalars& s, const float (&g)[8], float (&p)[8], float (&state)[8]) {
  switch (s.formula) {
    case Formula::sgd:
      return update_octet<Formula::sgd>(s, g, p, state);
    case Formula::momentum:
      return update_octet<Formula::momentum>(s, g, p, state);
    case Formula::nesterov:
      return update_octet<Formula::nesterov>(s, g, p, state);
    case Formula::adagrad:
      return update_octet<Formula::adagrad>(s, g, p, state);
    default:
      return update_octet<Formula::lion>(s, g, p, state);
  }
}

// CUDA block block_index: one chunk of one tensor. Casts have a kernel of their own: they need few registers, so more of their
// threads run at once.
template <bool kIsCast>
SHARDCORE_HD void element_body(const ChunkTable<ElementSegment>& table, const ElementScalars& s, int64_t block_index,
                               int thread) {
  const Chunk chunk = chunk_at(table, block_index, kElementChunk);
  const ElementSegment t = table.segments[chunk.tensor];
  const auto offset = [&](void* data, DType dtype) {
    return data != nullptr ? static_cast<char*>(data) + chunk.first * itemsize(dtype) : nullptr;
  };
  const char* const grad = static_cast<const char*>(t.grad) + chunk.first * itemsize(t.grad_dtype);
  char* const param = offset(t.param, t.param_dtype);
  char* const state = kIsCast ? nullptr : offset(t.state, t.state_dtype);
  const bool mastered = !kIsCast && t.master != nullptr;
  char* const weight = mastered ? offset(t.master, DType::f32) : param;
  const DType weight_dtype = mastered ? DType::f32 : t.param_dtype;
  SHARDCORE_ASSUME_GLOBAL(grad);
  SHARDCORE_ASSUME_GLOBAL(param);
  SHARDCORE_ASSUME_GLOBAL(weight);
  const int numel = static_cast<int>(t.numel - chunk.first < kElementChunk ? t.numel - chunk.first : kElementChunk);
  const bool aligned = is_aligned16(grad) && is_aligned16(param) && is_aligned16(state) && is_aligned16(weight);
  const int vector_numel = aligned ? numel / 8 * 8 : 0;
  const auto update = [&](auto vector, int i) {
    constexpr bool kVector = decltype(vector)::value;
    const Octet at{i, i + 4};
    float g[8], p[8] = {}, m[8] = {};
    load_octet<kVector>(grad, t.grad_dtype, at, numel, g);
    if (!kIsCast) load_octet<kVector>(weight, weight_dtype, at, numel, p);
    if (state != nullptr) load_octet<kVector>(state, t.state_dtype, at, numel, m);
    if (kIsCast) {
      update_octet<Formula::assign>(s, g, p, m);
    } else {
      update_octet(s, g, p, m);
    }
    if (state != nullptr) store_octet<kVector>(state, t.state_dtype, at, numel, m);
    store_octet<kVector>(param, t.param_dtype, at, numel, p);
    if (mastered) store_octet<kVector>(weight, DType::f32, at, numel, p);
  };
  int i = 8 * thread;
  SHARDCORE_NO_UNROLL
  for (; i < vector_numel; i += 8 * kElementThreads) update(std::true_type{}, i);
  SHARDCORE_NO_UNROLL
  for (; i < numel; i += 8 * kElementThreads) update(std::false_type{}, i);
}

}  // namespace shardcore

// One chunk of an Adam segment as a CUDA thread sees it: pointers moved to its first element, and single elements in and out.
#pragma once

#include <cstdint>

#include "adam/adam_form.h"
#include "adam/adam_scalars.h"
#include "adam/adam_segment.h"
#include "adam/state_codec.h"
#include "core/tile.h"
#include "core/vector_io.h"

namespace shardcore {

constexpr int kAdamThreads = 128;
constexpr int kAdamStride = 8 * kAdamThreads;  // what a CUDA block does at a time: 256 elements a warp
constexpr int kAdamChunk = 4 * kAdamStride;

struct AdamChunkView {
  char* param;
  const char* grad;
  char* exp_avg;
  char* exp_avg_sq;
  char* master;
  float* max_exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
  uint8_t* changed;
  int numel;
  DType param_dtype;
  DType grad_dtype;
  Master master_kind;
  StateDType state_dtype;
  bool any_f32;     // any stream, scales aside
  bool stochastic;  // weights
  uint64_t param_key;
  int64_t first_element;  // of the chunk, in the whole parameter
};

// kForm: an index of kAdamForms that fits the segment. What the form says is not read from the segment, so that nvcc knows it.
template <int kForm>
SHARDCORE_HD AdamChunkView adam_chunk_view(const AdamSegment& t, int64_t first, const AdamScalars& s) {
  constexpr AdamForm form = kAdamForms[kForm];
  const auto offset = [first](void* data, int64_t size) { return data ? static_cast<char*>(data) + first * size : nullptr; };
  const auto offset_f32 = [](float* data, int64_t count) { return data ? data + count : nullptr; };
  AdamChunkView view;
  view.param_dtype = form.any_dtypes ? t.param_dtype : form.param;
  view.grad_dtype = form.any_dtypes ? t.grad_dtype : form.grad;
  view.master_kind = form.any_dtypes ? t.master_kind : form.master;
  view.state_dtype = form.any_dtypes ? t.state_dtype : form.state;
  view.param = offset(t.param, itemsize(view.param_dtype));
  view.grad = static_cast<const char*>(t.grad) + first * itemsize(view.grad_dtype);
  view.exp_avg = offset(t.exp_avg, itemsize(view.state_dtype));
  view.exp_avg_sq = offset(t.exp_avg_sq, itemsize(view.state_dtype));
  view.master = offset(t.master, view.master_kind == Master::split ? 2 : 4);
  view.max_exp_avg_sq = form.any_dtypes ? offset_f32(t.max_exp_avg_sq, first) : nullptr;
  view.exp_avg_scale = offset_f32(t.exp_avg_scale, first / kBlock);
  view.exp_avg_sq_scale = offset_f32(t.exp_avg_sq_scale, first / kBlock);
  view.changed = form.any_state && t.changed ? t.changed + first / 8 : nullptr;
  view.numel = static_cast<int>(t.numel - first < kAdamChunk ? t.numel - first : kAdamChunk);
  view.any_f32 = view.param_dtype == DType::f32 || view.grad_dtype == DType::f32 || view.master_kind == Master::f32 ||
                 view.state_dtype == StateDType::f32;
  view.stochastic = rounds_weights_stochastically(view.param_dtype, view.master_kind, s.stochastic_rounding != 0);
  view.param_key = child_key(s.random_key, t.param_index);
  view.first_element = t.first_element + first;
  return view;
}

SHARDCORE_HD uint16_t round_bf16_exp_avg_sq(const AdamChunkView& t, float v, int i) {
  const int64_t element = t.first_element + i;
  return f32_to_bf16_stochastic(v, rounding_block_key(state_key(t.param_key), element), element);
}

SHARDCORE_HD uint16_t round_16bit_weight(const AdamChunkView& t, float p, int i) {
  if (t.stochastic) {
    const int64_t element = t.first_element + i;
    return f32_to_bf16_stochastic(p, rounding_block_key(t.param_key, element), element);
  }
  return t.param_dtype == DType::bf16 ? f32_to_bf16(p) : f32_to_f16(p);
}

// Sets bit i of `bits`, beside other threads that set bits of the same byte.
SHARDCORE_HD void set_bit(uint8_t* bits, int i) {
#if defined(__CUDA_ARCH__)
  const auto address = reinterpret_cast<uintptr_t>(bits + i / 8);
  atomicOr(reinterpret_cast<unsigned int*>(address & ~uintptr_t{3}), 1u << (8 * (address & 3) + i % 8));
#else
  __atomic_fetch_or(bits + i / 8, static_cast<uint8_t>(1u << (i % 8)), __ATOMIC_RELAXED);
#endif
}

SHARDCORE_HD float load_weight(const AdamChunkView& t, int i) {
  if (t.master_kind == Master::f32) return reinterpret_cast<const float*>(t.master)[i];
  if (t.master_kind == Master::split) {
    return split_to_f32(reinterpret_cast<const uint16_t*>(t.param)[i], reinterpret_cast<const int16_t*>(t.master)[i]);
  }
  return load_as_f32(t.param, t.param_dtype, i);
}

SHARDCORE_HD void store_weight(const AdamChunkView& t, int i, float p) {
  if (t.changed != nullptr) {  // a float32 master rounds to the weight, which may have no memory before the step
    const uint16_t before = t.master_kind == Master::f32 ? round_16bit_weight(t, load_weight(t, i), i)
                                                         : reinterpret_cast<const uint16_t*>(t.param)[i];
    if (before != round_16bit_weight(t, p, i)) set_bit(t.changed, i);
  }
  if (t.master_kind == Master::f32) reinterpret_cast<float*>(t.master)[i] = p;
  if (t.master_kind == Master::split) reinterpret_cast<int16_t*>(t.master)[i] = split_remainder(p);
  if (t.param_dtype == DType::f32) {
    reinterpret_cast<float*>(t.param)[i] = p;
  } else {
    reinterpret_cast<uint16_t*>(t.param)[i] = round_16bit_weight(t, p, i);
  }
}

// Moments that are not 8-bit.
SHARDCORE_HD float load_moment(const AdamChunkView& t, const char* data, int i) {
  return load_as_f32(data, t.state_dtype == StateDType::f32 ? DType::f32 : DType::bf16, i);
}

SHARDCORE_HD void store_moments(const AdamChunkView& t, int i, float m, float v) {
  if (t.state_dtype == StateDType::f32) {
    reinterpret_cast<float*>(t.exp_avg)[i] = m;
    reinterpret_cast<float*>(t.exp_avg_sq)[i] = v;
  } else {
    reinterpret_cast<uint16_t*>(t.exp_avg)[i] = f32_to_bf16(m);
    reinterpret_cast<uint16_t*>(t.exp_avg_sq)[i] = round_bf16_exp_avg_sq(t, v, i);
  }
}

}  // namespace shardcore

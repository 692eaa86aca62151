// One tensor of an Adam call, as plain data for the CPU loop and for the CUDA table.
#pragma once

#include <cstdint>

#include "core/convert.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "core/random.h"

namespace shardcore {

// What keeps the float32 weight that the formula works on.
enum class Master : uint8_t {
  none,   // the parameter itself
  f32,    // a float32 copy
  split,  // a bfloat16 parameter together with an int16 remainder (core/convert.h)
};

// How the moments are kept (state_codec.h).
enum class StateDType : uint8_t { f32, bf16, q8 };

SHARDCORE_HD int64_t itemsize(StateDType dtype) { return dtype == StateDType::f32 ? 4 : (dtype == StateDType::bf16 ? 2 : 1); }

struct AdamSegment {
  void* param;            // numel elements of param_dtype; written, and read unless a float32 master is given
  const void* grad;       // numel elements of grad_dtype
  void* exp_avg;          // numel elements of state_dtype (int8 if q8)
  void* exp_avg_sq;       // the same (uint8 if q8)
  void* master;           // numel float32 or int16, as `master_kind` says; null if none
  float* max_exp_avg_sq;  // null: no amsgrad; only with float32 states
  float* exp_avg_scale;   // q8 only: one for each 256 elements
  float* exp_avg_sq_scale;
  uint8_t* changed;  // null; or, of 16-bit weights, a bit each (i % 8 of byte i / 8), which a step sets where it changes them
  int64_t numel;
  uint64_t param_index;   // random key of stochastic rounding: which parameter,
  int64_t first_element;  // and which of its elements is element 0 here (blocks of q8 start here)
  int32_t hyper_index;
  DType param_dtype;
  DType grad_dtype;
  Master master_kind;
  StateDType state_dtype;
  bool aligned16;  // every pointer above is a multiple of 16 bytes (CUDA only)

  bool operator==(const AdamSegment&) const = default;
};

// bf16 bits of element `element` (index in the whole parameter) rounded stochastically. param_key: child_key(random_key,
// param_index). Loops over many elements hoist the block key, which is constant over 256 of them.
SHARDCORE_HD uint64_t rounding_block_key(uint64_t param_key, int64_t element) {
  return child_key(param_key, static_cast<uint64_t>(element >> 8));
}

// Whether bits of the step depend on random numbers.
SHARDCORE_HD bool rounds_weights_stochastically(DType param, Master master, bool option) {
  return option && master == Master::none && param == DType::bf16;
}

SHARDCORE_HD uint16_t f32_to_bf16_stochastic(float x, uint64_t block_key, int64_t element) {
  return f32_to_bf16_plus(x, random16(block_key, static_cast<uint32_t>(element & 255)));
}

}  // namespace shardcore

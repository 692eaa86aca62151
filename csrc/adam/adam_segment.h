// One tensor of an Adam call, as plain data for the CPU loop and for the CUDA table.
#pragma once

#include <cstdint>

#include "core/convert.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "core/random.h"

namespace shardcore {

struct AdamSegment {
  void* param;       // numel elements of param_dtype; written, and read unless master is given
  const void* grad;  // numel elements of grad_dtype
  float* exp_avg;
  float* exp_avg_sq;
  float* master;          // null: the formula works on param itself
  float* max_exp_avg_sq;  // null: no amsgrad
  int64_t numel;
  uint64_t param_index;   // random key of stochastic rounding: which parameter,
  int64_t first_element;  // and which of its elements is element 0 here
  int32_t hyper_index;
  DType param_dtype;
  DType grad_dtype;
  bool aligned16;  // every pointer above is a multiple of 16 bytes (CUDA only)

  bool operator==(const AdamSegment& o) const {
    return param == o.param && grad == o.grad && exp_avg == o.exp_avg && exp_avg_sq == o.exp_avg_sq && master == o.master &&
           max_exp_avg_sq == o.max_exp_avg_sq && numel == o.numel && param_index == o.param_index &&
           first_element == o.first_element && hyper_index == o.hyper_index && param_dtype == o.param_dtype &&
           grad_dtype == o.grad_dtype && aligned16 == o.aligned16;
  }
};

// bf16 bits of element `element` (index in the whole parameter) rounded stochastically. param_key: child_key(random_key,
// param_index). Loops over many elements hoist the block key, which is constant over 256 of them.
SHARDCORE_HD uint64_t rounding_block_key(uint64_t param_key, int64_t element) {
  return child_key(param_key, static_cast<uint64_t>(element >> 8));
}

SHARDCORE_HD uint16_t f32_to_bf16_stochastic(float x, uint64_t block_key, int64_t element) {
  return f32_to_bf16_plus(x, random16(block_key, static_cast<uint32_t>(element & 255)));
}

}  // namespace shardcore

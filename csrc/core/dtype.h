// The dtypes of parameters, gradients and pieces.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

enum class DType : uint8_t { f32 = 0, bf16 = 1, f16 = 2 };

SHARDCORE_HD int64_t itemsize(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace shardcore

// The last step of the ordered sum for one element, shared by CPU and CUDA.
#pragma once

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float scale_sum(float sum, double scale) { return static_cast<float>(static_cast<double>(sum) * scale); }

}  // namespace shardcore

// The scaling of the ordered sum, shared by the CPU loop and the CUDA body.
#pragma once

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float scale_sum(float sum, double scale) { return static_cast<float>(static_cast<double>(sum) * scale); }

}  // namespace shardcore

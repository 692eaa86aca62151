// Sizes in whole units: blocks of a file, pages of memory.
#pragma once

#include <cstdint>

namespace shardcore {

// The least multiple of `unit` that is at least `value`. value >= 0, unit > 0.
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace shardcore

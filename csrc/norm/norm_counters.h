// Which counter a launch of the norm counts its CUDA blocks with. Two launches that may run at the same time must not share
// one.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace shardcore {

class NormCounters {
 public:
  static constexpr int32_t kNone = -1;

  explicit NormCounters(int32_t count) : count_(count) {}

  // A stream has one for all its launches, which run one after the other. A launch that a graph captures has one of its own for
  // good: its replays may run beside any stream and any other graph. kNone once all are in use.
  int32_t acquire(const void* stream, bool captured) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto known = of_stream_.find(stream);
    if (!captured && known != of_stream_.end()) return known->second;
    if (num_acquired_ == count_) return kNone;
    if (!captured) of_stream_[stream] = num_acquired_;
    return num_acquired_++;
  }

 private:
  const int32_t count_;
  std::mutex lock_;
  int32_t num_acquired_ = 0;
  std::unordered_map<const void*, int32_t> of_stream_;
};

}  // namespace shardcore

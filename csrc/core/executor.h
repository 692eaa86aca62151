// The threads that kernels run on: torch's pool in csrc/bind, ThreadPool in workers and in the C++ tests.
#pragma once

#include <cstdint>
#include <functional>

namespace shardcore {

class Executor {
 public:
  using RangeFn = std::function<void(int64_t begin, int64_t end)>;

  virtual ~Executor() = default;
  // Calls fn on disjoint ranges that cover [begin, end), each at least `grain` long where possible, from any threads;
  // returns when all are done. The first exception of fn is thrown again here.
  virtual void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) = 0;
};

class SerialExecutor final : public Executor {
 public:
  void parallel_for(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFn& fn) override {
    if (begin < end) fn(begin, end);
  }
};

}  // namespace shardcore

// The host-thread backend: a thread a direction, first come, first served. Where there is no GPU, and in tests everywhere.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "copy/copy_stream.h"

namespace shardcore {

// When a link of so many bytes a second is done with each copy: one after the other, none before it is asked for.
class Throttle {
 public:
  // bytes_per_second: 0 for a link that takes no time.
  explicit Throttle(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  // A copy asked for at now_ns; returns when it is done.
  int64_t done_ns(int64_t now_ns, int64_t size_bytes);

 private:
  const double bytes_per_second_;
  int64_t free_at_ns_ = 0;
};

// How a tier of threads is made slower or worse than it is. Only for tests and benchmarks.
struct Simulation {
  double bytes_per_second = 0;  // of each direction; 0: as fast as memory. A copy is made at the end of its time
  int64_t failing_copy = 0;     // the n-th copy of the tier, both directions counted, fails; 0: none
  bool late = false;            // a copy is made only when someone waits for it: every wait that is left out shows
  int64_t pinnable_bytes = -1;  // "the system" locks so many bytes at most; -1: locking makes no difference
  // A clock of one's own; sleep_until is called on the copying thread.
  std::function<int64_t()> now_ns;
  std::function<void(int64_t until_ns)> sleep_until_ns;

  bool none() const { return bytes_per_second <= 0 && failing_copy == 0 && !late && pinnable_bytes < 0 && !now_ns; }
};

// Threads start with the first copy. In a child that was forked afterwards, where they do not exist, copies are made by the
// caller, and waiting for one that was in flight in the parent is a CopyError.
std::unique_ptr<CopyBackend> make_thread_backend(const Simulation& simulation = {});

}  // namespace shardcore

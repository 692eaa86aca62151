// A copy backend for tests: copies are slow, made as late as waits allow, or fail, as of a device whose system may refuse to
// lock pages. Who waits makes them, so no schedule of threads hides a wait that is missing.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "copy/copy_stream.h"

namespace shardcore::testing {

struct Simulation {
  double bytes_per_second = 0;  // of each direction; 0: as fast as memory. A copy is made at the end of its time
  int64_t failing_copy = 0;     // the n-th copy of the tier, both directions counted, fails; 0: none
  bool late = false;            // a copy is made only when someone waits for it
  int64_t pinnable_bytes = -1;  // "the system" locks so many bytes at most; -1: locking makes no difference
};

class SimulatedStream final : public CopyStream {
 public:
  SimulatedStream(Direction direction, const Simulation& simulation, std::atomic<int64_t>& tier_copies)
      : direction_(direction), simulation_(simulation), tier_copies_(tier_copies) {}
  ~SimulatedStream() override { drain(); }

  int64_t copy(void* dst, const void* src, int64_t size_bytes, void* /*stream*/) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    refuse();
    const double rate = simulation_.bytes_per_second;
    const double takes = rate > 0 ? std::min(1e6, static_cast<double>(size_bytes) / rate) : 0;
    link_is_free_ = std::max(link_is_free_, Clock::now()) +
                    std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(takes));
    jobs_.push_back({dst, src, size_bytes, ++tier_copies_ == simulation_.failing_copy, link_is_free_});
    ++queued_;
    if (rate <= 0 && !simulation_.late) make_first();
    return queued_;
  }

  void synchronize(int64_t number) override {
    std::unique_lock<std::mutex> lock(mutex_);
    make(lock, number);
    refuse();
  }

  void wait(int64_t number, void* /*stream*/) override { synchronize(number); }

  bool query(int64_t number) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!simulation_.late && !jobs_.empty() && jobs_.front().due <= Clock::now()) make_first();
    if (completed_ < number) return false;
    refuse();
    return true;
  }

  int64_t completed() noexcept override { return completed_; }
  int64_t queued() const noexcept override { return queued_; }

  void drain() noexcept override {
    std::unique_lock<std::mutex> lock(mutex_);
    ++draining_;
    changed_.notify_all();
    make(lock, queued_);
    --draining_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Job {
    void* dst;
    const void* src;
    int64_t size_bytes;
    bool fails;
    Clock::time_point due;
  };

  void refuse() const {
    if (!error_.empty()) throw CopyError(error_);
  }

  void make(std::unique_lock<std::mutex>& lock, int64_t number) {
    while (completed_ < number) {
      const Clock::time_point due = jobs_.front().due;
      if (draining_ > 0 || due <= Clock::now()) {
        make_first();
      } else {
        changed_.wait_until(lock, due, [&] { return draining_ > 0; });
      }
    }
  }

  void make_first() {
    const Job job = jobs_.front();
    jobs_.pop_front();
    if (error_.empty() && job.fails) {
      error_ = std::string("HostTier.") + direction_name(direction_) + ": copy " + std::to_string(completed_ + 1) + " of " +
               std::to_string(job.size_bytes) + " bytes failed (a planted fault); no later copy in this direction is made";
    }
    if (error_.empty()) std::memcpy(job.dst, job.src, static_cast<size_t>(job.size_bytes));
    ++completed_;
  }

  const Direction direction_;
  const Simulation simulation_;
  std::atomic<int64_t>& tier_copies_;  // of both directions
  std::mutex mutex_;                   // guards what follows; both numbers are also read without it
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  Clock::time_point link_is_free_;
  std::string error_;  // of the copy that broke the queue
  int draining_ = 0;
  std::atomic<int64_t> queued_{0}, completed_{0};
};

class SimulatedBackend final : public CopyBackend {
 public:
  explicit SimulatedBackend(const Simulation& simulation)
      : can_pin_(simulation.pinnable_bytes >= 0),
        streams_{{Direction::to_tier, simulation, copies_}, {Direction::from_tier, simulation, copies_}},
        pinnable_bytes_(simulation.pinnable_bytes) {}

  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }
  bool can_pin() const noexcept override { return can_pin_; }

  std::string pin(void* data, int64_t size_bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size_bytes > pinnable_bytes_) return "the simulated system locks no more pages";
    pinnable_bytes_ -= size_bytes;
    pinned_[data] = size_bytes;
    return "";
  }

  void unpin(void* data) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pinned_.find(data);
    pinnable_bytes_ += found->second;
    pinned_.erase(found);
  }

 private:
  const bool can_pin_;
  std::atomic<int64_t> copies_{0};
  SimulatedStream streams_[2];
  std::mutex mutex_;  // guards what follows
  int64_t pinnable_bytes_;
  std::map<void*, int64_t> pinned_;
};

inline std::unique_ptr<CopyBackend> make_simulated_backend(const Simulation& simulation = {}) {
  return std::make_unique<SimulatedBackend>(simulation);
}

}  // namespace shardcore::testing

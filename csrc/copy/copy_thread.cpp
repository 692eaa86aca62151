#include "copy/copy_thread.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "core/thread_pool.h"

namespace shardcore {
namespace {

using Clock = std::chrono::steady_clock;

struct Job {
  void* dst;
  const void* src;
  int64_t size_bytes;
  bool fails;
};

// What the caller and the copying thread share.
struct Queue {
  Queue(Direction which, const Simulation& how) : direction(which), simulation(how), link(how.bytes_per_second) {}

  const Direction direction;
  const Simulation simulation;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<Job> jobs;  // in flight; the first one is being made
  Throttle link;
  std::string error;   // of the copy that broke the queue
  int64_t wanted = 0;  // someone waits for this number
  bool hurry = false;
  bool stop = false;
  // Written under the mutex; a forked child, which must not touch the mutex, reads them.
  std::atomic<int64_t> queued{0};
  std::atomic<int64_t> completed{0};
  std::thread thread;

  bool due() const { return !jobs.empty() && (!simulation.late || hurry || wanted > completed); }
  void run();
  void copy(const Job& job) const;
  void take_time(std::unique_lock<std::mutex>& lock, int64_t size_bytes);
};

void Queue::copy(const Job& job) const { std::memcpy(job.dst, job.src, static_cast<size_t>(job.size_bytes)); }

void Queue::run() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    work.wait(lock, [&] { return due() || (stop && jobs.empty()); });
    if (jobs.empty()) return;
    const Job job = jobs.front();
    if (error.empty()) {
      take_time(lock, job.size_bytes);
      if (job.fails) {
        error = std::string("HostTier.") + direction_name(direction) + ": copy " + std::to_string(completed + 1) + " of " +
                std::to_string(job.size_bytes) + " bytes failed (a planted fault); no later copy in this direction is made";
      } else {
        lock.unlock();
        copy(job);
        lock.lock();
      }
    }
    jobs.pop_front();
    ++completed;
    done.notify_all();
  }
}

void Queue::take_time(std::unique_lock<std::mutex>& lock, int64_t size_bytes) {
  if (simulation.bytes_per_second <= 0) return;
  if (simulation.now_ns) {
    const int64_t until = link.done_ns(simulation.now_ns(), size_bytes);
    lock.unlock();
    simulation.sleep_until_ns(until);
    lock.lock();
    return;
  }
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  const Clock::time_point until{
      std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(link.done_ns(now, size_bytes)))};
  work.wait_until(lock, until, [&] { return hurry; });
}

class ThreadStream final : public CopyStream {
 public:
  ThreadStream(Direction direction, const Simulation& simulation, std::atomic<int64_t>& tier_copies)
      : simulation_(simulation), tier_copies_(tier_copies), queue_(new Queue(direction, simulation)) {}

  ~ThreadStream() override {
    if (orphaned()) return;  // the queue is leaked: its thread cannot be joined here
    if (pid_ != 0) {
      {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->hurry = queue_->stop = true;
      }
      queue_->work.notify_all();
      queue_->thread.join();
    }
    delete queue_;
  }

  int64_t copy(void* dst, const void* src, int64_t size_bytes, void* /*stream*/) override {
    const bool fails = ++tier_copies_ == simulation_.failing_copy;
    if (orphaned()) {
      std::memcpy(dst, src, static_cast<size_t>(size_bytes));
      return 0;
    }
    int64_t number = 0;
    {
      const std::lock_guard<std::mutex> lock(queue_->mutex);
      if (!queue_->error.empty()) throw CopyError(queue_->error);
      if (pid_ == 0) {
        queue_->thread = start_thread([queue = queue_] { queue->run(); });
        pid_ = getpid();
      }
      queue_->jobs.push_back({dst, src, size_bytes, fails});
      number = ++queue_->queued;
    }
    queue_->work.notify_all();
    return number;
  }

  void synchronize(int64_t number) override {
    if (orphaned()) {
      if (queue_->completed >= number) return;
      throw CopyError(std::string("HostTier.") + direction_name(queue_->direction) + ": copy " + std::to_string(number) +
                      " was in flight when this process was forked, and no thread here makes it; expected synchronize() "
                      "before the fork");
    }
    std::unique_lock<std::mutex> lock(queue_->mutex);
    await(lock, number);
    if (!queue_->error.empty()) throw CopyError(queue_->error);
  }

  void wait(int64_t number, void* /*stream*/) override { synchronize(number); }

  bool query(int64_t number) override {
    if (queue_->completed < number) return false;
    synchronize(number);  // at once
    return true;
  }

  int64_t completed() noexcept override { return queue_->completed; }
  int64_t queued() const noexcept override { return queue_->queued; }

  void drain(bool hurry) noexcept override {
    if (orphaned()) return;
    std::unique_lock<std::mutex> lock(queue_->mutex);
    queue_->hurry = queue_->hurry || hurry;
    await(lock, queue_->queued);
  }

 private:
  // Whether the thread was started, and by a process that this one was forked from.
  bool orphaned() const { return pid_ != 0 && pid_ != getpid(); }

  void await(std::unique_lock<std::mutex>& lock, int64_t number) {
    queue_->wanted = std::max(queue_->wanted, number);
    queue_->work.notify_all();
    queue_->done.wait(lock, [&] { return queue_->completed >= number; });
  }

  const Simulation simulation_;
  std::atomic<int64_t>& tier_copies_;  // of both directions
  Queue* const queue_;
  std::atomic<pid_t> pid_{0};  // that started the thread; 0: not started
};

class ThreadBackend final : public CopyBackend {
 public:
  explicit ThreadBackend(const Simulation& simulation)
      : simulation_(simulation),
        streams_{{Direction::to_tier, simulation, copies_}, {Direction::from_tier, simulation, copies_}},
        pinnable_bytes_(simulation.pinnable_bytes) {}

  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }
  bool caller_copies() const noexcept override { return simulation_.none(); }  // queues are what is simulated
  bool can_pin() const noexcept override { return simulation_.pinnable_bytes >= 0; }

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
  const Simulation simulation_;
  std::atomic<int64_t> copies_{0};
  ThreadStream streams_[2];
  std::mutex mutex_;  // guards what follows
  int64_t pinnable_bytes_;
  std::map<void*, int64_t> pinned_;
};

}  // namespace

int64_t Throttle::done_ns(int64_t now_ns, int64_t size_bytes) {
  const int64_t start = std::max(now_ns, free_at_ns_);
  const double takes = bytes_per_second_ > 0 ? std::ceil(static_cast<double>(size_bytes) * 1e9 / bytes_per_second_) : 0;
  // A link slower than any clock counts stays busy for good.
  free_at_ns_ = takes < static_cast<double>(INT64_MAX - start) ? start + static_cast<int64_t>(takes) : INT64_MAX;
  return free_at_ns_;
}

std::unique_ptr<CopyBackend> make_thread_backend(const Simulation& simulation) {
  return std::make_unique<ThreadBackend>(simulation);
}

}  // namespace shardcore

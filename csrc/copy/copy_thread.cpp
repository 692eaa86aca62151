// The host-thread backend of the cpu tier: one thread per direction, in the order of requests.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "copy/copy_stream.h"
#include "core/thread_pool.h"

namespace shardcore {
namespace {

struct Job {
  void* dst;
  const void* src;
  int64_t size_bytes;
};

// What the caller and the copying thread share.
struct Queue {
  explicit Queue(Direction which) : direction(which) {}

  const Direction direction;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<Job> jobs;  // in flight; the first one is being made
  bool stop = false;
  // Written under the mutex; a forked child, which must not touch the mutex, reads them.
  std::atomic<int64_t> queued{0};
  std::atomic<int64_t> completed{0};
  std::thread thread;

  void run();
};

void make(const Job& job) { std::memcpy(job.dst, job.src, static_cast<size_t>(job.size_bytes)); }

void Queue::run() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    work.wait(lock, [&] { return !jobs.empty() || stop; });
    if (jobs.empty()) return;
    const Job job = jobs.front();
    lock.unlock();
    make(job);
    lock.lock();
    jobs.pop_front();
    ++completed;
    done.notify_all();
  }
}

class ThreadStream final : public CopyStream {
 public:
  explicit ThreadStream(Direction direction) : queue_(new Queue(direction)) {}

  ~ThreadStream() override {
    if (orphaned()) return;  // the queue is leaked: its thread cannot be joined here
    if (pid_ != 0) {
      {
        const std::lock_guard<std::mutex> lock(queue_->mutex);
        queue_->stop = true;
      }
      queue_->work.notify_all();
      queue_->thread.join();
    }
    delete queue_;
  }

  int64_t copy(void* dst, const void* src, int64_t size_bytes, void* /*stream*/) override {
    const Job job{dst, src, size_bytes};
    if (orphaned()) {
      make(job);
      return 0;
    }
    int64_t number = 0;
    {
      const std::lock_guard<std::mutex> lock(queue_->mutex);
      if (pid_ == 0) {
        queue_->thread = start_thread([queue = queue_] { queue->run(); });
        pid_ = getpid();
      }
      queue_->jobs.push_back(job);
      number = ++queue_->queued;
    }
    queue_->work.notify_all();
    return number;
  }

  void synchronize(int64_t number) override {
    if (queue_->completed >= number) return;
    if (orphaned()) {
      throw CopyError(std::string("HostTier.") + direction_name(queue_->direction) + ": copy " + std::to_string(number) +
                      " was in flight when this process was forked, and no thread here makes it; expected synchronize() "
                      "before the fork");
    }
    std::unique_lock<std::mutex> lock(queue_->mutex);
    queue_->done.wait(lock, [&] { return queue_->completed >= number; });
  }

  void wait(int64_t number, void* /*stream*/) override { synchronize(number); }
  bool query(int64_t number) override { return queue_->completed >= number; }
  int64_t completed() noexcept override { return queue_->completed; }
  int64_t queued() const noexcept override { return queue_->queued; }

  void drain() noexcept override {
    if (!orphaned()) synchronize(queue_->queued);
  }

 private:
  // Whether the thread was started, and by a process that this one was forked from.
  bool orphaned() const { return pid_ != 0 && pid_ != getpid(); }

  Queue* const queue_;
  std::atomic<pid_t> pid_{0};  // that started the thread; 0: not started
};

class ThreadBackend final : public CopyBackend {
 public:
  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }

 private:
  ThreadStream streams_[2] = {ThreadStream(Direction::to_tier), ThreadStream(Direction::from_tier)};
};

}  // namespace

std::unique_ptr<CopyBackend> make_thread_backend() { return std::make_unique<ThreadBackend>(); }

}  // namespace shardcore

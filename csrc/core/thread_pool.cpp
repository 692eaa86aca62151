#include "core/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <utility>

namespace shardcore {

namespace {

// A part is a fraction of a thread's share, so that a late one (its core was busy) costs little.
constexpr int64_t kPartsPerThread = 16;
// A waiting thread spins this long before it sleeps: the next chunk of a step arrives sooner, and waking a thread takes as
// long.
constexpr std::chrono::microseconds kSpin{200};

// Yields its core to other threads until ready() or kSpin is over; returns ready().
template <typename Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end) return ready();
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

std::thread start_thread(std::function<void()> run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            "a thread cannot start; expected the system to allow one more than run now (ulimit -u, ulimit -v, "
                            "the container's limit of processes; or take fewer: offload={\"cpu_threads\": n})");
  }
}

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::vector<std::thread> threads;
  // One job at a time. It stays as it is while one of its parts is not done.
  const RangeFn* fn = nullptr;
  int64_t begin = 0, end = 0, part_size = 0;
  // Number of the job above, parts that no thread has taken yet below: a late thread cannot take a part of a job that it has
  // not seen.
  std::atomic<uint64_t> untaken{0};
  std::atomic<int64_t> undone{0};
  int sleeping = 0;  // guarded by the mutex, as are the next two
  bool stop = false;
  std::exception_ptr error;

  static int64_t parts_of(uint64_t word) { return static_cast<int64_t>(word & 0xffffffffu); }
  bool has_work() const { return parts_of(untaken.load(std::memory_order_acquire)) > 0; }
  void run_parts();
  void worker();
  void stop_and_join();
};

// Threads refer to the State, not to the pool, so that a constructor that fails midway can end them.
ThreadPool::ThreadPool(int num_threads, const Spawn& spawn)
    : num_threads_(std::max(1, num_threads)), pid_(getpid()), state_(nullptr) {
  auto state = std::make_unique<State>();
  state->threads.reserve(static_cast<size_t>(num_threads_));
  try {
    for (int i = 1; i < num_threads_; ++i) state->threads.push_back(spawn([s = state.get()] { s->worker(); }));
  } catch (...) {
    state->stop_and_join();
    throw;
  }
  state_ = state.release();
}

ThreadPool::~ThreadPool() {
  if (getpid() != pid_) return;
  state_->stop_and_join();
  delete state_;
}

void ThreadPool::State::stop_and_join() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    stop = true;
  }
  wake.notify_all();
  for (std::thread& thread : threads) thread.join();
}

// Takes parts, the last one first, until none is left.
void ThreadPool::State::run_parts() {
  uint64_t word = untaken.load(std::memory_order_acquire);
  while (parts_of(word) > 0) {
    if (!untaken.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel)) continue;
    const int64_t first = begin + (parts_of(word) - 1) * part_size;
    try {
      (*fn)(first, std::min(end, first + part_size));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
    }
    if (undone.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::lock_guard<std::mutex> lock(mutex);
      done.notify_one();
    }
    word = untaken.load(std::memory_order_acquire);
  }
}

void ThreadPool::State::worker() {
  for (;;) {
    if (!spin_until([this] { return has_work(); })) {
      std::unique_lock<std::mutex> lock(mutex);
      ++sleeping;
      wake.wait(lock, [this] { return stop || has_work(); });
      --sleeping;
      if (stop) return;
    }
    run_parts();
  }
}

void ThreadPool::parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) {
  if (begin >= end) return;
  const int64_t count = end - begin;
  const int64_t most = count / std::max<int64_t>(1, grain);
  if (num_threads_ == 1 || most < 2 || getpid() != pid_) {
    fn(begin, end);
    return;
  }
  const int64_t part_size = (count - 1) / std::min(most, kPartsPerThread * num_threads_) + 1;
  const int64_t parts = (count - 1) / part_size + 1;
  State& job = *state_;
  job.fn = &fn, job.begin = begin, job.end = end, job.part_size = part_size;
  job.undone.store(parts, std::memory_order_relaxed);
  const uint64_t number = (job.untaken.load(std::memory_order_relaxed) >> 32) + 1;
  job.untaken.store(number << 32 | static_cast<uint64_t>(parts), std::memory_order_release);
  {
    const std::lock_guard<std::mutex> lock(job.mutex);  // a thread about to sleep has seen the job, or is woken
    if (job.sleeping > 0) job.wake.notify_all();
  }
  job.run_parts();
  const auto is_done = [&job] { return job.undone.load(std::memory_order_acquire) == 0; };
  std::unique_lock<std::mutex> lock(job.mutex, std::defer_lock);
  if (!spin_until(is_done)) {
    lock.lock();
    job.done.wait(lock, is_done);
  } else {
    lock.lock();
  }
  if (job.error) std::rethrow_exception(std::exchange(job.error, nullptr));
}

}  // namespace shardcore

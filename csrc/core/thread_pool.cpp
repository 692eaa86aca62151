#include "core/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <memory>

namespace shardcore {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::vector<std::thread> threads;
  // One job at a time, split into parts of equal size; part i belongs to thread i.
  const RangeFn* fn = nullptr;
  int64_t begin = 0, end = 0, part_size = 0;
  uint64_t generation = 0;
  int running = 0;
  bool stop = false;
  std::exception_ptr error;

  void run_part(int index);
  void worker(int index);
  void stop_and_join();
};

// Threads know the State, not the pool, so that a constructor that fails midway can end them.
ThreadPool::ThreadPool(int num_threads, const Spawn& spawn)
    : num_threads_(std::max(1, num_threads)), pid_(getpid()), state_(nullptr) {
  auto state = std::make_unique<State>();
  state->threads.reserve(static_cast<size_t>(num_threads_));
  try {
    for (int i = 1; i < num_threads_; ++i) state->threads.push_back(spawn([s = state.get(), i] { s->worker(i); }));
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

void ThreadPool::State::run_part(int index) {
  const int64_t first = begin + index * part_size;
  const int64_t last = std::min(end, first + part_size);
  if (first >= last) return;
  try {
    (*fn)(first, last);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = std::current_exception();
  }
}

void ThreadPool::State::worker(int index) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    wake.wait(lock, [&] { return stop || generation != seen; });
    if (stop) return;
    seen = generation;
    lock.unlock();
    run_part(index);
    lock.lock();
    if (--running == 0) done.notify_one();
  }
}

void ThreadPool::parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) {
  if (begin >= end) return;
  const int64_t count = end - begin;
  const int64_t parts = std::min<int64_t>(num_threads_, std::max<int64_t>(1, count / std::max<int64_t>(1, grain)));
  if (parts == 1 || getpid() != pid_) {
    fn(begin, end);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->fn = &fn;
    state_->begin = begin;
    state_->end = end;
    state_->part_size = (count + parts - 1) / parts;
    state_->running = num_threads_ - 1;
    state_->error = nullptr;
    ++state_->generation;
  }
  state_->wake.notify_all();
  state_->run_part(0);
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->running == 0; });
  if (state_->error) std::rethrow_exception(state_->error);
}

}  // namespace shardcore

#include "core/thread_pool.h"

#include <unistd.h>

#include <algorithm>

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
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(std::max(1, num_threads)), pid_(getpid()), state_(new State) {
  for (int i = 1; i < num_threads_; ++i) state_->threads.emplace_back([this, i] { worker(i); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != pid_) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

void ThreadPool::run_part(int index) {
  const int64_t first = state_->begin + index * state_->part_size;
  const int64_t last = std::min(state_->end, first + state_->part_size);
  if (first >= last) return;
  try {
    (*state_->fn)(first, last);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->error) state_->error = std::current_exception();
  }
}

void ThreadPool::worker(int index) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(state_->mutex);
  for (;;) {
    state_->wake.wait(lock, [&] { return state_->stop || state_->generation != seen; });
    if (state_->stop) return;
    seen = state_->generation;
    lock.unlock();
    run_part(index);
    lock.lock();
    if (--state_->running == 0) state_->done.notify_one();
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
  run_part(0);
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->done.wait(lock, [&] { return state_->running == 0; });
  if (state_->error) std::rethrow_exception(state_->error);
}

}  // namespace shardcore

#include "io/file_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "core/thread_pool.h"

namespace shardcore {
namespace {

// Attempts that moved nothing after which a request fails; each waits a millisecond.
constexpr int kMaxAttempts = 100;
constexpr int64_t kKeptBytes = int64_t{64} << 20;

int check_depth(int depth) {
  if (depth < 1 || depth > FileEngine::kMaxDepth) {
    throw std::invalid_argument("FileEngine: depth has " + std::to_string(depth) + "; expected 1 to " +
                                std::to_string(FileEngine::kMaxDepth) + " (transfers in flight at once)");
  }
  return depth;
}

class ThreadsBackend final : public IoBackend {
 public:
  ThreadsBackend(const Faults& faults, int depth) : IoBackend(faults), depth_(static_cast<size_t>(depth)) {}

  ~ThreadsBackend() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const std::vector<IoRequest*>& requests) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (threads_.size() < depth_ && threads_.size() - busy_ < queued_.size() + requests.size()) {
        try {
          threads_.push_back(start_thread([this] { run(); }));
        } catch (const std::system_error&) {
          if (threads_.empty()) throw;
          break;  // those that run do the work
        }
      }
      queued_.insert(queued_.end(), requests.begin(), requests.end());
    }
    requests.size() == 1 ? work_.notify_one() : work_.notify_all();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stop_ || !queued_.empty(); });
      if (queued_.empty()) return;
      IoRequest& request = *queued_.front();
      queued_.pop_front();
      ++busy_;
      lock.unlock();
      while (!handle_result(request, transfer(request))) {
      }
      request.owner->finished(request);
      lock.lock();
      --busy_;
    }
  }

  int64_t transfer(IoRequest& request) const {
    const int64_t injected = begin(request);
    if (injected != 0 || moves_nothing()) return injected;
    char* const data = request.data + request.done_bytes;
    const auto size = static_cast<size_t>(request.transfer_bytes);
    const off_t at = request.offset + request.done_bytes;
    const ssize_t result =
        request.op == FileOp::read ? pread(request.file->fd(), data, size, at) : pwrite(request.file->fd(), data, size, at);
    return result < 0 ? -errno : result;
  }

  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<IoRequest*> queued_;
  std::vector<std::thread> threads_;
  size_t busy_ = 0;  // threads that make a transfer
  bool stop_ = false;
};

}  // namespace

IoError IoRequest::failure() const {
  const std::string what = (op == FileOp::read ? "read" : "write") + std::string(" at offset ") +
                           std::to_string(offset + done_bytes) + " failed: " + std::to_string(size_bytes) + " bytes asked at " +
                           std::to_string(offset) + ", " + std::to_string(done_bytes) + " done";
  return IoError::of(error, file->path(), what);
}

int64_t IoBackend::begin(IoRequest& request) const {
  if (faults_.delay_ms() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(faults_.delay_ms()));
  if (request.attempts > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const int64_t left = request.size_bytes - request.done_bytes;
  request.transfer_bytes = faults_.shortened(left, request.file->block_bytes());
  request.direct = request.file->direct();
  return -faults_.error(request.op, request.offset + request.done_bytes, left, request.attempts == 0, request.direct);
}

bool IoBackend::handle_result(IoRequest& request, int64_t result) const {
  if (result == -EINVAL && request.direct && request.file->stop_direct()) return false;
  const bool again = result == -EINTR || result == -EAGAIN;
  if (result < 0 && !again) {
    request.error = static_cast<int>(-result);
    return true;
  }
  const int64_t before = request.done_bytes;
  if (result > 0) {
    request.file->note_success();
    request.done_bytes += result;
    const int64_t needed = request.op == FileOp::read ? request.needed_bytes : request.size_bytes;
    if (request.done_bytes >= needed) {
      if (request.op == FileOp::read) faults_.flip(FileOp::read, request.data, request.offset, request.done_bytes);
      return true;
    }
    request.done_bytes -= request.done_bytes % request.file->block_bytes();  // a transfer begins with a whole block
  }
  request.attempts = request.done_bytes > before ? 0 : request.attempts + 1;
  // A read that brings nothing is at the end of the file, which was longer once.
  if (request.attempts < kMaxAttempts && !(result == 0 && request.op == FileOp::read && !moves_nothing())) return false;
  request.error = again ? static_cast<int>(-result) : EIO;
  return true;
}

std::unique_ptr<IoBackend> make_threads_backend(const Faults& faults, int depth) {
  return std::make_unique<ThreadsBackend>(faults, depth);
}

FileEngine::FileEngine(const std::string& backend, int depth, const std::string& faults)
    : depth_(check_depth(depth)), pid_(getpid()), faults_(faults), buffers_(std::make_shared<BufferPool>(kKeptBytes)) {
  if (backend != "auto" && backend != "io_uring" && backend != "threads") {
    throw std::invalid_argument("FileEngine: backend has \"" + backend + "\"; expected auto, io_uring or threads");
  }
  if (backend != "threads") {
    backend_ = make_uring_backend(faults_, depth, note_);
    if (backend_ == nullptr && backend == "io_uring") throw IoError(ENOSYS, "", "FileEngine: " + note_);
  }
  backend_name_ = backend_ != nullptr ? "io_uring" : "threads";
  if (backend_ == nullptr) backend_ = make_threads_backend(faults_, depth);
}

FileEngine::~FileEngine() {
  if (orphaned()) static_cast<void>(backend_.release());
}

bool FileEngine::orphaned() const { return getpid() != pid_; }

void FileEngine::check_not_orphaned(const char* op) const {
  if (orphaned()) {
    throw std::logic_error(std::string(op) +
                           ": its FileEngine was made before this process was forked; expected one made in this process");
  }
}

void FileEngine::submit(const std::vector<IoRequest*>& requests) {
  check_not_orphaned("a read or write");
  for (IoRequest* const request : requests) {
    request->done_bytes = request->error = request->attempts = 0;
    if (request->op == FileOp::write) faults_.flip(FileOp::write, request->data, request->offset, request->size_bytes);
  }
  backend_->submit(requests);
}

}  // namespace shardcore

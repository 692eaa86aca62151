// Transfers by io_uring, through liburing (SHARDCORE_WITH_LIBURING).
//
// One thread owns the ring: it submits, waits, and hands results on. (A request that another thread submits is cancelled when
// that thread ends, and the kernel interrupts the thread to complete it.) submit() wakes it through an eventfd that the ring
// polls; it sleeps in the kernel otherwise.
// Buffers are not registered with the ring: that saved no time, and a fork copies pages that are locked.
#include "io/file_engine.h"

#ifdef SHARDCORE_WITH_LIBURING
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/thread_pool.h"
#endif

namespace shardcore {

#ifdef SHARDCORE_WITH_LIBURING

namespace {

class Ring {
 public:
  // entries: requests that are prepared at most before they are submitted. error is not 0 if there is no ring.
  explicit Ring(unsigned entries) : error(-io_uring_queue_init(entries, &raw, 0)) {}
  ~Ring() {
    if (error == 0) io_uring_queue_exit(&raw);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring raw{};
  const int error;
};

class UringBackend final : public IoBackend {
 public:
  UringBackend(const Faults& faults, int depth, std::unique_ptr<Ring> ring, int wake_fd)
      : IoBackend(faults), depth_(static_cast<size_t>(depth)), ring_(std::move(ring)), wake_fd_(wake_fd) {}

  ~UringBackend() override {
    if (thread_.joinable()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
      }
      wake();
      thread_.join();
    }
    ring_.reset();
    ::close(wake_fd_);
  }

  void submit(const std::vector<IoRequest*>& requests) override {
    bool asleep = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
      queued_.insert(queued_.end(), requests.begin(), requests.end());
      asleep = std::exchange(asleep_, false);
    }
    if (asleep) wake();
  }

 private:
  void wake() const { static_cast<void>(eventfd_write(wake_fd_, 1)); }

  // Starts what is ready and what is queued, as much as may be in flight. Returns false at the end.
  bool fill(std::vector<IoRequest*>& ready) {
    for (;;) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        while (in_flight_ + ready.size() < depth_ && !queued_.empty()) {
          ready.push_back(queued_.front());
          queued_.pop_front();
        }
        if (ready.empty()) {
          asleep_ = in_flight_ < depth_;
          return !stop_ || in_flight_ > 0;
        }
      }
      for (IoRequest* const request : ready) start(*request);
      ready.clear();
    }
  }

  void run() {
    bool polling = false;
    std::vector<IoRequest*> ready;  // to be continued
    while (fill(ready)) {
      if (!polling) {
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_->raw);
        io_uring_prep_poll_add(entry, wake_fd_, POLLIN);
        io_uring_sqe_set_data(entry, nullptr);
        polling = true;
      }
      const int result = io_uring_submit_and_wait(&ring_->raw, 1);
      bool any = false;
      for (io_uring_cqe* entry; io_uring_peek_cqe(&ring_->raw, &entry) == 0; any = true) {
        auto* const request = static_cast<IoRequest*>(io_uring_cqe_get_data(entry));
        const int64_t transferred = entry->res;
        io_uring_cqe_seen(&ring_->raw, entry);
        if (request == nullptr) {
          eventfd_t count;
          static_cast<void>(eventfd_read(wake_fd_, &count));  // it does not block
          polling = false;
          continue;
        }
        --in_flight_;
        if (!end(*request, transferred)) ready.push_back(request);
      }
      // The kernel is short of memory; what was not submitted is, with the next call.
      if (result < 0 && result != -EINTR && !any) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Prepares the next transfer of a request; one whose result is known without is over here.
  void start(IoRequest& request) {
    for (;;) {
      const int64_t injected = begin(request);
      if (injected == 0 && !moves_nothing()) break;
      if (end(request, injected)) return;
    }
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_->raw);  // there are more than requests in flight
    char* const data = request.data + request.done_bytes;
    const auto size = static_cast<unsigned>(request.transfer_bytes);
    const auto at = static_cast<uint64_t>(request.offset + request.done_bytes);
    if (request.op == FileOp::read) {
      io_uring_prep_read(entry, request.file->fd(), data, size, at);
    } else {
      io_uring_prep_write(entry, request.file->fd(), data, size, at);
    }
    io_uring_sqe_set_data(entry, &request);
    ++in_flight_;
  }

  bool end(IoRequest& request, int64_t result) const {
    const bool over = handle_result(request, result);
    if (over) request.owner->finished(request);
    return over;
  }

  const size_t depth_;
  std::unique_ptr<Ring> ring_;  // the thread's
  const int wake_fd_;
  size_t in_flight_ = 0;  // in the ring; the thread's
  std::mutex mutex_;      // guards the rest
  std::deque<IoRequest*> queued_;
  bool asleep_ = false;  // the thread does not look at the queue until it is woken
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace

bool has_liburing() { return true; }

std::unique_ptr<IoBackend> make_uring_backend(const Faults& faults, int depth, std::string& note) {
  const std::string refused = "io_uring is not used: ";
  auto ring = std::make_unique<Ring>(static_cast<unsigned>(depth) + 1);  // one that polls the eventfd
  if (ring->error != 0) {
    note = refused + "io_uring_setup: " + std::strerror(ring->error);
    return nullptr;
  }
  io_uring_probe* const probe = io_uring_get_probe_ring(&ring->raw);
  const bool reads = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
  io_uring_free_probe(probe);
  if (!reads) {
    note = refused + "this kernel is too old (Linux 5.6 is needed)";
    return nullptr;
  }
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    note = refused + "eventfd: " + std::strerror(errno);
    return nullptr;
  }
  return std::make_unique<UringBackend>(faults, depth, std::move(ring), wake_fd);
}

#else

bool has_liburing() { return false; }

std::unique_ptr<IoBackend> make_uring_backend(const Faults& /*faults*/, int /*depth*/, std::string& note) {
  note = "io_uring is not used: this build has no liburing (install liburing-dev, and build again)";
  return nullptr;
}

#endif

}  // namespace shardcore

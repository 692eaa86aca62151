// Asynchronous transfers between memory and files: the queue, its two backends, and what becomes of each result.
//
// A request is one read or write of a file at an offset. It is queued by submit(), made in the background, and then handed to
// its owner's finished(), on a thread of the engine. Every result is checked: a transfer that moved less than was asked is
// continued, EINTR and EAGAIN are tried again, EINVAL ends O_DIRECT (Note [Direct transfers]); what remains is an error with
// its errno, offset, and bytes asked and done. Results of fdatasync and the like: file.h.
//
// A request, its memory and its file must live until it is finished; owners wait for that in their destructors.
//
// Note [Fork]
// In a forked child neither the engine's threads nor its ring exist. submit() throws there, and nothing is waited for or
// released that the parent's threads may have held locked: the child's copy of the engine is leaked.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/buffer_pool.h"
#include "io/faults.h"
#include "io/file.h"

namespace shardcore {

struct IoRequest;

class IoOwner {
 public:
  // The request is over: its error is set or its bytes are there. The engine uses neither afterwards.
  virtual void finished(IoRequest& request) noexcept = 0;

 protected:
  ~IoOwner() = default;
};

struct IoRequest {
  FileOp op = FileOp::read;  // read or write
  File* file = nullptr;
  char* data = nullptr;
  int64_t offset = 0, size_bytes = 0;  // multiples of the file's block, as is the address of data
  int64_t needed_bytes = 0;            // of a read: how many must come; the rest may lie behind the end of the file
  IoOwner* owner = nullptr;

  // What came of it.
  int64_t done_bytes = 0;
  int error = 0;  // errno

  // The engine's.
  int attempts = 0;            // since bytes were transferred last
  int64_t transfer_bytes = 0;  // of the current transfer
  bool direct = false;         // whether it is

  // "write at offset 1048576 failed: 1048576 bytes asked, 0 done: Input/output error"
  IoError failure() const;
};

// Makes the transfers of requests. The rules for their results are in the base class, once.
class IoBackend {
 public:
  virtual ~IoBackend() = default;  // no request is in flight
  // Never blocks for long.
  virtual void submit(const std::vector<IoRequest*>& requests) = 0;

 protected:
  explicit IoBackend(const Faults& faults) : faults_(faults) {}

  // Before each transfer: sets request.transfer_bytes and request.direct, and returns 0, or a result that takes the transfer's
  // place (an injected -errno). Waits, if transfers are to be delayed, or if this request is tried again.
  int64_t begin(IoRequest& request) const;
  bool moves_nothing() const { return faults_.stuck(); }
  // Handles a transfer's result (bytes, or -errno). Returns whether the request is over; else it needs another transfer.
  bool handle_result(IoRequest& request, int64_t result) const;

 private:
  const Faults& faults_;
};

class FileEngine {
 public:
  static constexpr int64_t kTransferBytes = int64_t{1} << 20;  // the most that one request moves
  static constexpr int kMaxDepth = 256;
  static constexpr int kBuffersPerTransfer = 2;  // of a writer: copies run ahead, so a busy core does not keep the disk waiting

  // backend: "auto", "io_uring" or "threads". depth: how many transfers are in flight at once. Starts no thread. Throws
  // std::invalid_argument; IoError for "io_uring" where there is none.
  FileEngine(const std::string& backend, int depth, const std::string& faults);
  ~FileEngine();
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  const std::string& backend() const { return backend_name_; }
  const std::string& note() const { return note_; }
  int writer_buffers() const { return kBuffersPerTransfer * depth_; }  // that a writer has at most
  const Faults& faults() const { return faults_; }
  // Of reads, which outlive the engine, and of writers.
  const std::shared_ptr<BufferPool>& buffers() { return buffers_; }

  // Queues requests, of one file. Throws std::logic_error in a forked child, and what starting a thread throws.
  void submit(const std::vector<IoRequest*>& requests);
  // Whether this is a child that was forked after the engine was made.
  bool orphaned() const;
  void check_not_orphaned(const char* op) const;  // throws std::logic_error

 private:
  const int depth_;
  const pid_t pid_;
  const Faults faults_;
  std::string backend_name_, note_;
  std::shared_ptr<BufferPool> buffers_;
  std::unique_ptr<IoBackend> backend_;
};

// One thread for each transfer in flight, started when the first needs it.
std::unique_ptr<IoBackend> make_threads_backend(const Faults& faults, int depth);

// Null if io_uring is not there; why is put in note.
std::unique_ptr<IoBackend> make_uring_backend(const Faults& faults, int depth, std::string& note);
bool has_liburing();  // whether this build has

}  // namespace shardcore

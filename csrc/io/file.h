// A file, open for transfers that go past the page cache where they can, and what is done to files besides.
//
// Note [Direct transfers]
// With O_DIRECT the kernel wants memory, offsets and sizes in whole blocks. The size of a block is what
// statx(STATX_DIOALIGN) says, or 4096 where a kernel does not say, and never less, so that files move between disks. A file
// system that has no direct transfers says so when the file is opened, or (EINVAL) at its first transfer: the file is then
// transferred through the page cache, in the same blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace shardcore {

// An operation on a file that failed. The text says what was asked, at which offset, and what came; it has no path, which
// Python's OSError adds.
class IoError : public std::runtime_error {
 public:
  IoError(int number, std::string file, const std::string& text)
      : std::runtime_error(text), error_number(number), path(std::move(file)) {}
  // "text: No space left on device"
  static IoError of(int number, const std::string& file, const std::string& text);

  const int error_number;
  const std::string path;
};

class File {
 public:
  enum class Mode { read, write, overwrite };

  // write: creates the file, or empties it; overwrite: creates it, or keeps the space that it has. Throws IoError, for what is
  // no regular file, too.
  File(const std::string& path, Mode mode, bool direct);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int64_t size_bytes() const { return size_bytes_; }  // when it was opened
  // What offsets and sizes of transfers are multiples of: a power of two; 1 if the file was opened without O_DIRECT.
  int64_t block_bytes() const { return block_bytes_; }

  bool direct() const { return direct_; }
  // After EINVAL for a transfer that began while direct(): turns O_DIRECT off, unless such a transfer has worked before.
  // Returns whether the transfer should be made again: O_DIRECT is off then, by whichever thread.
  bool stop_direct() noexcept;
  void note_success() noexcept {
    if (!worked_.load(std::memory_order_relaxed)) worked_.store(true, std::memory_order_relaxed);
  }

  // Takes the space of the file, so that writes into it cannot meet a full disk; nothing where the file system cannot. After
  // an error (IoError) it has the size that it had when it was opened.
  void reserve(int64_t size_bytes, int injected_error);
  void truncate(int64_t size_bytes);
  // fdatasync.
  void sync(int injected_error);

 private:
  const std::string path_;
  int fd_ = -1;
  int64_t size_bytes_ = 0;
  int64_t block_bytes_ = 1;
  std::atomic<bool> direct_{false};
  std::atomic<bool> worked_{false};  // a transfer has
  std::mutex stopping_;              // of stop_direct: what works once O_DIRECT is off must not refuse another thread's
};

// Exchanges the names of two files or directories at once. Returns false, with nothing done, where the kernel or the file
// system cannot. Throws IoError.
bool exchange_paths(const std::string& a, const std::string& b);

}  // namespace shardcore

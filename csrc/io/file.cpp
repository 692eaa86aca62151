#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace shardcore {
namespace {

constexpr int64_t kDefaultBlock = 4096;
constexpr int64_t kLargestBlock = 1 << 20;  // of a device that says more than a transfer's size; there the page cache is used
constexpr unsigned kRenameExchange = 2;     // RENAME_EXCHANGE of linux/fs.h

// Calls until it is not interrupted.
template <typename Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

int open_path(const std::string& path, int flags) {
  return uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
}

// The size of a block for direct transfers; 0 if this file has none.
int64_t direct_block(int fd) {
#ifdef STATX_DIOALIGN
  struct statx about {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 && (about.stx_mask & STATX_DIOALIGN) != 0) {
    if (about.stx_dio_offset_align == 0) return 0;
    return std::max<int64_t>({kDefaultBlock, about.stx_dio_offset_align, about.stx_dio_mem_align});
  }
#else
  static_cast<void>(fd);
#endif
  return kDefaultBlock;
}

}  // namespace

IoError IoError::of(int number, const std::string& file, const std::string& text) {
  return IoError(number, file, text + ": " + std::strerror(number));
}

File::File(const std::string& path, Mode mode, bool direct) : path_(path) {
  const int flags = mode == Mode::read ? O_RDONLY : O_RDWR | O_CREAT | (mode == Mode::write ? O_TRUNC : 0);
  if (direct) {
    fd_ = open_path(path, flags | O_DIRECT);
    if (fd_ < 0 && errno != EINVAL) throw IoError::of(errno, path, "open");
    direct_ = fd_ >= 0;
  }
  if (fd_ < 0) fd_ = open_path(path, flags);
  if (fd_ < 0) throw IoError::of(errno, path, "open");
  struct stat about {};
  const int error = fstat(fd_, &about) != 0 ? errno : S_ISDIR(about.st_mode) ? EISDIR : S_ISREG(about.st_mode) ? 0 : EINVAL;
  if (error != 0) {
    ::close(fd_);
    throw IoError::of(error, path, error == EINVAL ? "open: expected a regular file" : "open");
  }
  size_bytes_ = about.st_size;
  if (direct_) {
    block_bytes_ = direct_block(fd_);
    if (block_bytes_ == 0 || block_bytes_ > kLargestBlock) {
      stop_direct();
      block_bytes_ = 1;
    }
  }
}

File::~File() { ::close(fd_); }

bool File::stop_direct() noexcept {
  const std::lock_guard<std::mutex> lock(stopping_);
  if (!direct_) return true;
  if (worked_) return false;
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) return false;
  direct_ = false;
  return true;
}

void File::reserve(int64_t size_bytes, int injected_error) {
  if (size_bytes == 0) return;
  int error = injected_error;
  if (error == 0 && uninterrupted([&] { return fallocate(fd_, 0, 0, size_bytes); }) != 0) error = errno;
  if (error == 0 || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL) return;
  static_cast<void>(uninterrupted([&] { return ftruncate(fd_, size_bytes_); }));  // gives back what was taken
  throw IoError::of(error, path_, "reserve " + std::to_string(size_bytes) + " bytes");
}

void File::truncate(int64_t size_bytes) {
  if (uninterrupted([&] { return ftruncate(fd_, size_bytes); }) != 0) {
    throw IoError::of(errno, path_, "truncate to " + std::to_string(size_bytes) + " bytes");
  }
}

void File::sync(int injected_error) {
  int error = injected_error;
  if (error == 0 && uninterrupted([&] { return fdatasync(fd_); }) != 0) error = errno;
  if (error != 0) throw IoError::of(error, path_, "fdatasync");
}

bool exchange_paths(const std::string& a, const std::string& b) {
#ifdef SYS_renameat2
  if (syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kRenameExchange) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
  throw IoError::of(errno, a, "exchange with " + b);
#else
  static_cast<void>(a), static_cast<void>(b);
  return false;
#endif
}

}  // namespace shardcore

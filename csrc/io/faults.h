// Faults that tests put into the transfers of a FileEngine: errors, short transfers, delays, flipped bits.
// They are part of every build, so that tests break the code that users run; without rules they cost a branch per transfer.
//
// A comma-separated list of rules:
//   write:EIO@1048576    a write that moves this byte of its file fails with this error (read: for reads). Without @ each does.
//                        EINTR and EAGAIN only at the first attempt; EINVAL only while the transfer is direct.
//   reserve:ENOSPC       taking the space of a file, when a FileWriter is made, fails; sync:EIO: fdatasync does.
//   short                each transfer of more than one block moves only half of its blocks.
//   stuck                each transfer moves nothing, without an error.
//   delay:5              each transfer begins 5 ms later (with io_uring one after the other).
//   flip:read@7          the lowest bit of byte 7 of the file is flipped after it was read (flip:write@7: before it is
//   written).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardcore {

enum class FileOp { read, write, reserve, sync };

class Faults {
 public:
  // Throws std::invalid_argument.
  explicit Faults(const std::string& rules);

  // The error of an operation on [offset, offset + size_bytes) of a file; 0: none.
  int error(FileOp op, int64_t offset, int64_t size_bytes, bool first_attempt, bool direct) const {
    return rules_.empty() ? 0 : find_error(op, offset, size_bytes, first_attempt, direct);
  }
  int error(FileOp op) const { return error(op, 0, INT64_MAX, true, false); }
  // Of size_bytes in blocks, how many a transfer moves.
  int64_t shortened(int64_t size_bytes, int64_t block_bytes) const {
    return short_ && size_bytes >= 2 * block_bytes ? size_bytes / 2 / block_bytes * block_bytes : size_bytes;
  }
  bool stuck() const { return stuck_; }
  int delay_ms() const { return delay_ms_; }
  // Flips bits of [offset, offset + size_bytes) of a file, which are at data.
  void flip(FileOp op, char* data, int64_t offset, int64_t size_bytes) const;

 private:
  struct Rule {
    FileOp op;
    int error;       // 0: flip a bit
    int64_t offset;  // -1: any
  };
  int find_error(FileOp op, int64_t offset, int64_t size_bytes, bool first_attempt, bool direct) const;

  std::vector<Rule> rules_;
  bool short_ = false, stuck_ = false;
  int delay_ms_ = 0;
};

}  // namespace shardcore

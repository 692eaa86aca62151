// A file written from its beginning to its end, reads of any part of a file, and transfers in place, by a FileEngine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "io/file_engine.h"

namespace shardcore {

// What an engine's thread and a waiting one share. In a forked child it is leaked (std::unique_ptr::release): its destructor
// would wait for threads of the parent that waited when the fork was made.
struct IoSignal {
  std::mutex mutex;
  std::condition_variable changed;
};

// Writes a file in the background: bytes are copied to buffers, one for each transfer. The calls of several threads follow one
// another. An error of a write is thrown by the next call, and by all later ones but close().
class FileWriter : public IoOwner {
 public:
  // Creates the file, or empties it (overwrite: writes over what it holds, in place), and takes its space. Throws IoError.
  FileWriter(std::shared_ptr<FileEngine> engine, const std::string& path, int64_t size_bytes, bool direct,
             bool overwrite = false);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Appends bytes and returns their CRC-32C. Waits only if all buffers are in flight. Throws IoError, or std::invalid_argument
  // for bytes beyond the size of the file.
  uint32_t append(const void* data, int64_t bytes);
  // Writes what is left, waits for all writes, and then makes the file durable. Throws IoError, or std::invalid_argument if
  // bytes are missing.
  void finish();
  // Waits for writes in flight and closes the file, which stays unfinished if finish() was not called.
  void close() noexcept;

  void finished(IoRequest& request) noexcept override;

 private:
  void check_usable(const char* op) const;
  void throw_error();
  void acquire_buffer();
  void submit();
  void drain() noexcept;

  const std::shared_ptr<FileEngine> engine_;
  const std::string path_;
  const int64_t size_bytes_;
  std::mutex calls_;  // held by append, finish, close
  std::unique_ptr<File> file_;
  std::vector<BufferPool::Buffer> buffers_;
  std::vector<std::unique_ptr<IoRequest>> requests_;  // one for each buffer
  IoRequest* current_ = nullptr;                      // is being filled
  int64_t filled_ = 0;                                // bytes of it
  int64_t appended_ = 0;                              // bytes of the file
  bool is_finished_ = false;

  std::unique_ptr<IoSignal> signal_ = std::make_unique<IoSignal>();  // its mutex guards the rest
  std::vector<IoRequest*> free_;
  size_t in_flight_ = 0;
  std::optional<IoError> error_;  // the first
};

// One transfer between memory and a part of a file: the requests that make it.
class FileTransfer final : public IoOwner {
 public:
  // op: read or write. data, offset and bytes: in whole blocks of the file; bytes > 0. needed_bytes: how many of a read must
  // come. The memory must live as long as this. Throws what FileEngine::submit throws, and std::bad_alloc.
  FileTransfer(std::shared_ptr<FileEngine> engine, std::shared_ptr<File> file, FileOp op, char* data, int64_t offset,
               int64_t bytes, int64_t needed_bytes);
  ~FileTransfer();  // waits
  FileTransfer(const FileTransfer&) = delete;
  FileTransfer& operator=(const FileTransfer&) = delete;

  // Throws IoError, each time; std::logic_error in a forked child.
  void wait();

  void finished(IoRequest& request) noexcept override;

 private:
  void drain() noexcept;

  const std::shared_ptr<FileEngine> engine_;
  const std::shared_ptr<File> file_;
  std::vector<IoRequest> requests_;

  std::unique_ptr<IoSignal> signal_ = std::make_unique<IoSignal>();
  size_t in_flight_;  // guarded by its mutex
};

// One read, into memory of its own.
class FileRead {
 public:
  // [offset, offset + bytes) of the file; bytes > 0. Throws what FileTransfer's constructor throws.
  FileRead(std::shared_ptr<FileEngine> engine, std::shared_ptr<File> file, int64_t offset, int64_t bytes);
  ~FileRead();
  FileRead(const FileRead&) = delete;
  FileRead& operator=(const FileRead&) = delete;

  struct Result {
    std::shared_ptr<BufferPool> pool;
    BufferPool::Buffer buffer;  // the caller gives it back to the pool
    char* data;                 // in the buffer
  };
  // Waits, once. Throws IoError; std::logic_error when called again, or in a forked child.
  Result wait();

 private:
  const std::shared_ptr<FileEngine> engine_;
  const std::shared_ptr<BufferPool> pool_;
  BufferPool::Buffer buffer_;
  int64_t start_;  // of the first byte asked for, in the buffer
  std::unique_ptr<FileTransfer> transfer_;
  std::atomic<bool> waited_{false};
};

// A file for reads of any part. May be used by several threads at once.
class FileReader {
 public:
  // Throws IoError.
  FileReader(std::shared_ptr<FileEngine> engine, const std::string& path, bool direct);

  int64_t size_bytes() const { return size_bytes_; }
  // Starts a read; bytes > 0. Throws std::invalid_argument for what lies outside of the file, or if the reader is closed.
  std::unique_ptr<FileRead> start(int64_t offset, int64_t bytes);
  // Throws what start() throws for such a range.
  std::shared_ptr<File> check(int64_t offset, int64_t bytes) const;
  // The file is closed when the last read that was started is over.
  void close() noexcept;

 private:
  const std::shared_ptr<FileEngine> engine_;
  const std::string path_;
  mutable std::mutex mutex_;  // guards file_
  std::shared_ptr<File> file_;
  int64_t size_bytes_;
};

// A file of a fixed size whose blocks are read and written in place, from and to memory of the caller. New blocks read as
// zeros. May be used by several threads at once; what a part has while it is written is undefined.
class BlockFile {
 public:
  // Creates the file, or gives it its size, and takes its space; what it has stays. Throws IoError.
  BlockFile(std::shared_ptr<FileEngine> engine, const std::string& path, int64_t size_bytes, bool direct);

  int64_t block_bytes() const { return block_bytes_; }  // what data, offset and bytes are multiples of
  // op: read or write; bytes > 0. Throws std::invalid_argument for what is not in whole blocks, or not inside of the file.
  std::unique_ptr<FileTransfer> start(FileOp op, void* data, int64_t offset, int64_t bytes);
  void sync();  // what was written is durable; throws IoError

 private:
  const std::shared_ptr<FileEngine> engine_;
  const int64_t size_bytes_;
  std::shared_ptr<File> file_;
  int64_t block_bytes_ = 1;
};

}  // namespace shardcore

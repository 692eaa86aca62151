#include "io/file_io.h"

#include <algorithm>
#include <cstring>

#include "core/round_up.h"
#include "io/crc32c.h"

namespace shardcore {

FileWriter::FileWriter(std::shared_ptr<FileEngine> engine, const std::string& path, int64_t size_bytes, bool direct,
                       bool overwrite)
    : engine_(std::move(engine)), path_(path), size_bytes_(size_bytes) {
  if (size_bytes < 0) {
    throw std::invalid_argument("FileWriter: size_bytes has " + std::to_string(size_bytes) + "; expected 0 or more");
  }
  file_ = std::make_unique<File>(path, overwrite ? File::Mode::overwrite : File::Mode::write, direct);
  file_->reserve(round_up(size_bytes, file_->block_bytes()), engine_->faults().error(FileOp::reserve));
}

FileWriter::~FileWriter() {
  close();
  if (engine_->orphaned()) static_cast<void>(signal_.release());
}

void FileWriter::check_usable(const char* op) const {
  if (file_ != nullptr && !is_finished_) return;
  throw std::invalid_argument(std::string("FileWriter.") + op + ": " + path_ + " is " +
                              (file_ == nullptr ? "closed" : "finished") + "; expected a file that is being written");
}

void FileWriter::throw_error() {
  const std::lock_guard<std::mutex> lock(signal_->mutex);
  if (error_) throw IoError(*error_);
}

// Makes a buffer the current one. Waits for one if all are queued.
void FileWriter::acquire_buffer() {
  std::unique_lock<std::mutex> lock(signal_->mutex);
  if (free_.empty() && requests_.size() < static_cast<size_t>(engine_->writer_buffers())) {
    requests_.reserve(static_cast<size_t>(engine_->writer_buffers()));
    buffers_.reserve(static_cast<size_t>(engine_->writer_buffers()));
    free_.reserve(static_cast<size_t>(engine_->writer_buffers()));  // finished() cannot allocate
    auto request = std::make_unique<IoRequest>();
    request->op = FileOp::write, request->file = file_.get(), request->owner = this;
    buffers_.push_back(engine_->buffers()->acquire(FileEngine::kTransferBytes));
    request->data = buffers_.back().data;
    requests_.push_back(std::move(request));
    current_ = requests_.back().get();
  } else {
    signal_->changed.wait(lock, [&] { return !free_.empty(); });
    current_ = free_.back();
    free_.pop_back();
  }
  filled_ = 0;
}

// Queues the current buffer, in whole blocks; bytes behind the end of the file are zeros.
void FileWriter::submit() {
  IoRequest& request = *current_;
  request.offset = appended_ - filled_;
  request.size_bytes = round_up(filled_, file_->block_bytes());
  std::memset(request.data + filled_, 0, static_cast<size_t>(request.size_bytes - filled_));
  {
    const std::lock_guard<std::mutex> lock(signal_->mutex);
    ++in_flight_;
  }
  current_ = nullptr;
  try {
    engine_->submit({&request});
  } catch (...) {  // nothing was queued
    const std::lock_guard<std::mutex> lock(signal_->mutex);
    --in_flight_;
    free_.push_back(&request);
    error_.emplace(EAGAIN, path_, "write at offset " + std::to_string(request.offset) + " could not be started");
    throw;
  }
}

uint32_t FileWriter::append(const void* data, int64_t bytes) {
  engine_->check_not_orphaned("FileWriter.append");  // first: a call of the parent may hold the mutex
  const std::lock_guard<std::mutex> one(calls_);
  check_usable("append");
  throw_error();
  if (bytes > size_bytes_ - appended_) {
    throw std::invalid_argument("FileWriter.append: tensor has " + std::to_string(bytes) + " bytes; expected at most " +
                                std::to_string(size_bytes_ - appended_) + " (" + path_ + " was given " +
                                std::to_string(size_bytes_) + " bytes in all, of which " + std::to_string(appended_) +
                                " were appended)");
  }
  uint32_t crc = 0;
  const char* src = static_cast<const char*>(data);
  while (bytes > 0) {
    if (current_ == nullptr) acquire_buffer();
    const int64_t part = std::min(bytes, FileEngine::kTransferBytes - filled_);
    crc = copy_crc32c(current_->data + filled_, src, part, crc);
    src += part, bytes -= part, filled_ += part, appended_ += part;
    if (filled_ == FileEngine::kTransferBytes) {
      submit();
      throw_error();
    }
  }
  return crc;
}

void FileWriter::finish() {
  engine_->check_not_orphaned("FileWriter.finish");
  const std::lock_guard<std::mutex> one(calls_);
  check_usable("finish");
  throw_error();
  if (appended_ != size_bytes_) {
    throw std::invalid_argument("FileWriter.finish: " + path_ + " has " + std::to_string(appended_) + " bytes; expected " +
                                std::to_string(size_bytes_) + " (append the rest, or make the writer with the right size)");
  }
  if (current_ != nullptr) submit();
  drain();
  throw_error();
  // The padding, and what an older file had behind the end of this one.
  if (size_bytes_ % file_->block_bytes() != 0 || file_->size_bytes() > size_bytes_) file_->truncate(size_bytes_);
  file_->sync(engine_->faults().error(FileOp::sync));
  is_finished_ = true;
}

void FileWriter::drain() noexcept {
  if (engine_->orphaned()) return;
  std::unique_lock<std::mutex> lock(signal_->mutex);
  signal_->changed.wait(lock, [&] { return in_flight_ == 0; });
}

void FileWriter::close() noexcept {
  if (engine_->orphaned()) return;  // a call of the parent may hold the mutex; the descriptor is closed with the file
  const std::lock_guard<std::mutex> one(calls_);
  if (file_ == nullptr) return;
  drain();
  for (const BufferPool::Buffer& buffer : buffers_) engine_->buffers()->release(buffer);
  buffers_.clear();
  requests_.clear();
  free_.clear();
  current_ = nullptr;
  file_.reset();
}

void FileWriter::finished(IoRequest& request) noexcept {
  const std::lock_guard<std::mutex> lock(signal_->mutex);
  if (request.error != 0 && !error_) error_.emplace(request.failure());
  free_.push_back(&request);
  --in_flight_;
  signal_->changed.notify_all();  // with the mutex held: a writer that waits may be destroyed right after
}

FileTransfer::FileTransfer(std::shared_ptr<FileEngine> engine, std::shared_ptr<File> file, FileOp op, char* data,
                           int64_t offset, int64_t bytes, int64_t needed_bytes)
    : engine_(std::move(engine)), file_(std::move(file)) {
  in_flight_ = static_cast<size_t>((bytes - 1) / FileEngine::kTransferBytes + 1);
  requests_.resize(in_flight_);
  std::vector<IoRequest*> queued;
  queued.reserve(in_flight_);
  int64_t at = 0;
  for (IoRequest& request : requests_) {
    request.op = op, request.file = file_.get(), request.owner = this;
    request.data = data + at, request.offset = offset + at;
    request.size_bytes = std::min(bytes - at, FileEngine::kTransferBytes);
    request.needed_bytes = std::clamp<int64_t>(needed_bytes - at, 0, request.size_bytes);
    at += request.size_bytes;
    queued.push_back(&request);
  }
  engine_->submit(queued);  // throws with nothing queued
}

FileTransfer::~FileTransfer() {
  if (engine_->orphaned()) {
    static_cast<void>(signal_.release());
  } else {
    drain();
  }
}

void FileTransfer::drain() noexcept {
  std::unique_lock<std::mutex> lock(signal_->mutex);
  signal_->changed.wait(lock, [&] { return in_flight_ == 0; });
}

void FileTransfer::wait() {
  engine_->check_not_orphaned("FileTransfer.wait");
  drain();
  for (const IoRequest& request : requests_) {
    if (request.error != 0) throw request.failure();
  }
}

void FileTransfer::finished(IoRequest& /*request*/) noexcept {
  const std::lock_guard<std::mutex> lock(signal_->mutex);
  if (--in_flight_ == 0) signal_->changed.notify_all();  // with the mutex held, as above
}

FileRead::FileRead(std::shared_ptr<FileEngine> engine, std::shared_ptr<File> file, int64_t offset, int64_t bytes)
    : engine_(std::move(engine)), pool_(engine_->buffers()) {
  const int64_t block = file->block_bytes();
  const int64_t begin = offset - offset % block, end = round_up(offset + bytes, block);
  start_ = offset - begin;
  buffer_ = pool_->acquire(end - begin);
  try {
    transfer_ = std::make_unique<FileTransfer>(engine_, std::move(file), FileOp::read, buffer_.data, begin, end - begin,
                                               offset + bytes - begin);
  } catch (...) {  // nothing was queued
    pool_->release(buffer_);
    throw;
  }
}

FileRead::~FileRead() {
  if (engine_->orphaned()) return;  // the transfer's destructor waits for nothing there, either
  transfer_.reset();
  if (buffer_.data != nullptr) pool_->release(buffer_);
}

FileRead::Result FileRead::wait() {
  engine_->check_not_orphaned("FileRead.wait");
  if (waited_.exchange(true)) throw std::logic_error("FileRead.wait: was called before; expected one call");
  transfer_->wait();
  const BufferPool::Buffer buffer = buffer_;
  buffer_ = {};
  return {pool_, buffer, buffer.data + start_};
}

FileReader::FileReader(std::shared_ptr<FileEngine> engine, const std::string& path, bool direct)
    : engine_(std::move(engine)),
      path_(path),
      file_(std::make_shared<File>(path, File::Mode::read, direct)),
      size_bytes_(file_->size_bytes()) {}

std::shared_ptr<File> FileReader::check(int64_t offset, int64_t bytes) const {
  if (offset < 0 || bytes < 0 || offset > size_bytes_ || bytes > size_bytes_ - offset) {
    throw std::invalid_argument("FileReader.start: offset " + std::to_string(offset) + " and nbytes " + std::to_string(bytes) +
                                " lie outside of " + path_ + "; expected a part of its " + std::to_string(size_bytes_) +
                                " bytes");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (file_ == nullptr) throw std::invalid_argument("FileReader.start: " + path_ + " is closed; expected an open reader");
  return file_;
}

std::unique_ptr<FileRead> FileReader::start(int64_t offset, int64_t bytes) {
  return std::make_unique<FileRead>(engine_, check(offset, bytes), offset, bytes);
}

void FileReader::close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  file_.reset();
}

BlockFile::BlockFile(std::shared_ptr<FileEngine> engine, const std::string& path, int64_t size_bytes, bool direct)
    : engine_(std::move(engine)),
      size_bytes_(size_bytes),
      file_(std::make_shared<File>(path, File::Mode::overwrite, direct)),
      block_bytes_(file_->block_bytes()) {
  if (size_bytes < 0 || size_bytes % block_bytes_ != 0) {
    throw std::invalid_argument("BlockFile: size_bytes has " + std::to_string(size_bytes) + "; expected a multiple of " +
                                std::to_string(block_bytes_) + " (the block of " + path + ")");
  }
  file_->reserve(size_bytes, engine_->faults().error(FileOp::reserve));
  file_->truncate(size_bytes);  // where no space could be taken it has its size at least
}

std::unique_ptr<FileTransfer> BlockFile::start(FileOp op, void* data, int64_t offset, int64_t bytes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(block_bytes_));
  if (bytes <= 0 || offset < 0 || offset > size_bytes_ || bytes > size_bytes_ - offset ||
      (offset | bytes | address) % block_bytes_ != 0) {
    throw std::invalid_argument("BlockFile.start: offset " + std::to_string(offset) + " and " + std::to_string(bytes) +
                                " bytes of memory; expected whole blocks of " + std::to_string(block_bytes_) + " inside of " +
                                file_->path() + ", which has " + std::to_string(size_bytes_));
  }
  return std::make_unique<FileTransfer>(engine_, file_, op, static_cast<char*>(data), offset, bytes, bytes);
}

void BlockFile::sync() {
  engine_->check_not_orphaned("BlockFile.sync");
  file_->sync(engine_->faults().error(FileOp::sync));
}

}  // namespace shardcore

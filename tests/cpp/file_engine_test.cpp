// The file engine: checksums, both backends, results of transfers, faults, requests of several threads.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "cpp/common.h"
#include "io/crc32c.h"
#include "io/file_io.h"

namespace shardcore::testing {
namespace {

using FileBytes = std::vector<uint8_t>;

FileBytes random_bytes(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  FileBytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// Bit by bit, as the definition says.
uint32_t slow_crc32c(const FileBytes& bytes, uint32_t polynomial = 0x82f63b78u) {
  uint32_t crc = ~0u;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
  }
  return ~crc;
}

std::vector<std::string> backends() {
  const bool uring = FileEngine("auto", 1, "").backend() == "io_uring";
  return uring ? std::vector<std::string>{"threads", "io_uring"} : std::vector<std::string>{"threads"};
}

struct file_engine : ::testing::Test {
  file_engine() : path(::testing::TempDir() + "shardcore_file_engine_" + std::to_string(getpid())) {}
  ~file_engine() override { unlink(path.c_str()); }

  void write(const std::shared_ptr<FileEngine>& engine, const FileBytes& bytes, bool direct = true) const {
    FileWriter writer(engine, path, static_cast<int64_t>(bytes.size()), direct);
    for (size_t at = 0; at < bytes.size();) {  // in parts that grow
      const size_t part = std::min(bytes.size() - at, 2 * at + 1);
      writer.append(bytes.data() + at, static_cast<int64_t>(part));
      at += part;
    }
    writer.finish();
  }

  FileBytes read(const std::shared_ptr<FileEngine>& engine, int64_t offset, int64_t size, bool direct = true) const {
    FileReader reader(engine, path, direct);
    return end(*reader.start(offset, size), size);
  }

  static FileBytes end(FileRead& read, int64_t size) {
    const FileRead::Result result = read.wait();
    const auto* const data = reinterpret_cast<const uint8_t*>(result.data);
    const FileBytes bytes(data, data + size);
    result.pool->release(result.buffer);
    return bytes;
  }

  const std::string path;
};

template <typename Call>
std::pair<int, std::string> io_error_of(const Call& call) {
  try {
    call();
  } catch (const IoError& error) {
    return {error.error_number, error.what()};
  }
  return {0, ""};
}

TEST_F(file_engine, checksums_are_those_of_the_definition) {
  const FileBytes digits{'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  EXPECT_EQ(slow_crc32c(digits), 0xe3069283u);
  EXPECT_NE(slow_crc32c(digits, 0xedb88320u), 0xe3069283u);  // CRC-32
  std::vector<size_t> sizes;
  for (size_t size = 0; size < 40; ++size) sizes.push_back(size);
  for (const size_t size : {1000, 8000, 24000, 24001, 48007}) sizes.push_back(size);
  for (const size_t size : sizes) {
    const FileBytes bytes = random_bytes(size, static_cast<unsigned>(size));
    const uint32_t expected = slow_crc32c(bytes);
    for (const int64_t misalign : {0, 1, 7}) {
      Buffer src(static_cast<int64_t>(size), misalign);
      src.set_bytes(bytes);
      const auto count = static_cast<int64_t>(size), first = count / 3;
      EXPECT_EQ(crc32c(src.data(), count), expected) << size;
      EXPECT_EQ(crc32c_by_table(src.data(), count), expected) << size;
      EXPECT_EQ(crc32c(src.as<uint8_t>() + first, count - first, crc32c(src.data(), first)), expected) << size;
      for (const auto copy : {&copy_crc32c, &copy_crc32c_by_table}) {
        Buffer dst(count, 8 - misalign);
        EXPECT_EQ(copy(dst.data(), src.data(), count, 0), expected) << size;
        EXPECT_EQ(dst.bytes(), bytes) << size;
        EXPECT_TRUE(dst.sentinels_intact()) << size;
      }
    }
  }
}

TEST_F(file_engine, files_come_back_whatever_happens_to_single_transfers) {
  const FileBytes bytes = random_bytes(2'200'001, 1);
  for (const std::string& backend : backends()) {
    for (const char* const faults : {"", "short", "write:EINTR,read:EAGAIN", "write:EINVAL,read:EINVAL", "delay:1,short"}) {
      for (const bool direct : {true, false}) {
        const auto engine = std::make_shared<FileEngine>(backend, 3, faults);
        write(engine, bytes, direct);
        EXPECT_EQ(read(engine, 0, 2'200'001, direct), bytes) << backend << faults << direct;
        EXPECT_EQ(read(engine, 1'048'575, 1'048'578, direct), FileBytes(bytes.begin() + 1'048'575, bytes.begin() + 2'097'153))
            << backend << faults << direct;
      }
    }
  }
}

TEST_F(file_engine, faults_are_found_and_named) {
  const FileBytes bytes = random_bytes(5 << 20, 2);
  for (const std::string& backend : backends()) {
    const auto sound = std::make_shared<FileEngine>(backend, 2, "");
    const auto writes = std::make_shared<FileEngine>(backend, 2, "write:EIO@2097152");
    const auto [number, text] = io_error_of([&] { write(writes, bytes); });
    EXPECT_EQ(number, EIO);
    EXPECT_NE(text.find("write at offset 2097152 failed: 1048576 bytes asked"), std::string::npos) << text;
    write(sound, bytes);
    for (const char* const faults : {"read:EIO@3145729", "stuck"}) {
      const auto reads = std::make_shared<FileEngine>(backend, 2, faults);
      const auto [read_number, read_text] = io_error_of([&] { read(reads, 3'145'728, 100); });
      EXPECT_EQ(read_number, EIO) << faults;
      EXPECT_NE(read_text.find(" bytes asked at 3145728, 0 done"), std::string::npos) << read_text;
    }
    EXPECT_EQ(io_error_of([&] { write(std::make_shared<FileEngine>(backend, 2, "reserve:ENOSPC"), bytes); }).first, ENOSPC);
    EXPECT_EQ(io_error_of([&] { write(std::make_shared<FileEngine>(backend, 2, "sync:EIO"), bytes); }).first, EIO);
    write(std::make_shared<FileEngine>(backend, 2, "flip:write@1048577"), bytes);
    FileBytes flipped = bytes;
    flipped[1'048'577] ^= 1;
    EXPECT_EQ(read(sound, 0, 5 << 20), flipped);
    EXPECT_EQ(read(std::make_shared<FileEngine>(backend, 2, "flip:read@1048577"), 0, 5 << 20), bytes);
  }
}

TEST_F(file_engine, several_threads_read_at_once) {
  const FileBytes bytes = random_bytes(2'000'000, 4);
  for (const std::string& backend : backends()) {
    const auto engine = std::make_shared<FileEngine>(backend, 4, "");
    write(engine, bytes);
    FileReader reader(engine, path, true);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        for (int i = 0; i < 30; ++i) {
          const auto offset = static_cast<int64_t>(random() % 1'999'000), size = static_cast<int64_t>(1 + random() % 1000);
          const auto first = reader.start(offset, size);
          const auto dropped = reader.start(0, 100'000);  // its end waits
          wrong += end(*first, size) != FileBytes(bytes.begin() + offset, bytes.begin() + offset + size);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0) << backend;
  }
}

TEST_F(file_engine, objects_may_be_destroyed_with_transfers_in_flight) {
  const FileBytes bytes = random_bytes(4 << 20, 5);
  for (const std::string& backend : backends()) {
    auto engine = std::make_shared<FileEngine>(backend, 4, "delay:5");
    {
      FileWriter writer(engine, path, 4 << 20, true);
      writer.append(bytes.data(), 4 << 20);
    }
    struct stat about {};
    EXPECT_EQ(stat(path.c_str(), &about), 0);
    std::unique_ptr<FileRead> last;
    {
      FileReader reader(engine, path, true);
      for (int i = 0; i < 3; ++i) static_cast<void>(reader.start(i * 1000, 2 << 20));
      last = reader.start(5, 3 << 20);
    }
    engine.reset();
    EXPECT_EQ(end(*last, 3 << 20), FileBytes(bytes.begin() + 5, bytes.begin() + 5 + (3 << 20)));
  }
}

TEST_F(file_engine, blocks_are_read_and_written_in_place) {
  constexpr int64_t kBlock = 4096, kBlocks = 1000;  // several requests for each transfer
  for (const std::string& backend : backends()) {
    for (const bool direct : {true, false}) {
      const auto engine = std::make_shared<FileEngine>(backend, 4, "short");
      BlockFile file(engine, path, kBlocks * kBlock, direct);
      FileBytes bytes = random_bytes(kBlocks * kBlock, 3);
      auto* const memory = static_cast<char*>(std::aligned_alloc(kBlock, kBlocks * kBlock));
      std::copy(bytes.begin(), bytes.end(), memory);
      file.start(FileOp::write, memory + 300 * kBlock, 300 * kBlock, 700 * kBlock)->wait();
      file.start(FileOp::write, memory, 0, 100 * kBlock);  // its end waits
      file.sync();
      std::fill_n(memory, kBlocks * kBlock, '\xff');
      {
        const auto first = file.start(FileOp::read, memory, 0, 500 * kBlock);
        const auto second = file.start(FileOp::read, memory + 500 * kBlock, 500 * kBlock, 500 * kBlock);
        second->wait();
        first->wait();
        first->wait();
      }
      std::fill(bytes.begin() + 100 * kBlock, bytes.begin() + 300 * kBlock, uint8_t{0});  // the hole
      ASSERT_EQ(std::memcmp(memory, bytes.data(), bytes.size()), 0) << backend;
      if (file.block_bytes() > 1) {
        EXPECT_THROW(file.start(FileOp::read, memory + 1, 0, kBlock), std::invalid_argument);
        EXPECT_THROW(file.start(FileOp::read, memory, 0, kBlock - 1), std::invalid_argument);
        EXPECT_THROW(BlockFile(engine, path + "x", 1, direct), std::invalid_argument);
        unlink((path + "x").c_str());
      }
      EXPECT_THROW(file.start(FileOp::read, memory, kBlock, kBlocks * kBlock), std::invalid_argument);
      EXPECT_THROW(file.start(FileOp::write, memory, 0, 0), std::invalid_argument);
      BlockFile broken(std::make_shared<FileEngine>(backend, 4, "write:EIO@8192"), path, kBlocks * kBlock, direct);
      const auto failing = broken.start(FileOp::write, memory, 0, 4 * kBlock);
      for (int time = 0; time < 2; ++time) EXPECT_EQ(io_error_of([&] { failing->wait(); }).first, EIO);
      std::free(memory);
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // which starts no threads in a child
TEST_F(file_engine, a_forked_child_is_told_and_can_make_its_own) {
  const FileBytes bytes = random_bytes(2 << 20, 6);
  for (const std::string& backend : backends()) {
    auto engine = std::make_shared<FileEngine>(backend, 1, "delay:100");
    write(std::make_shared<FileEngine>(backend, 4, ""), bytes);
    auto reader = std::make_unique<FileReader>(engine, path, true);
    auto in_flight = reader->start(0, 2 << 20);
    auto waited_for = reader->start(0, 2 << 20);
    std::thread waiter([&read = *waited_for] { end(read, 2 << 20); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits now
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      int code = 0;
      try {
        static_cast<void>(reader->start(0, 100));
        code |= 1;
      } catch (const std::logic_error&) {
      }
      try {
        in_flight->wait();
        code |= 2;
      } catch (const std::logic_error&) {
      }
      waited_for.reset(), in_flight.reset(), reader.reset(), engine.reset();
      const auto own = std::make_shared<FileEngine>(backend, 4, "");
      if (read(own, 0, 2 << 20) != bytes) code |= 4;
      _exit(code);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << backend;
    EXPECT_EQ(end(*in_flight, 2 << 20), bytes) << backend;
    waiter.join();
  }
}
#endif

}  // namespace
}  // namespace shardcore::testing

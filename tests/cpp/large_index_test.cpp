// Elements beyond 2^31: the last chunks of huge tensors, whose memory is reserved and exists only where it is touched. Every
// stream is tried at a place to which an index cut to 32 bits would lead instead; then the bits must differ.
#include <sys/mman.h>

#include "cpp/adam_problem.h"
#include "cpp/cuda_kernels.h"
#include "elementwise/element_cpu.h"
#include "norm/norm_cpu.h"
#include "reduce/reduce_cpu.h"

namespace shardcore::testing {
namespace {

constexpr int64_t kWrap = int64_t{1} << 32;  // what an element index loses when it is cut to 32 bits
// The first element with data: past 2^31, a multiple of all chunk sizes and of the norm's groups of blocks.
constexpr int64_t kFirst = (int64_t{1} << 31) + (int64_t{1} << 20);
static_assert(kFirst % kAdamChunk == 0 && kFirst % (kBlock * 256) == 0 && kFirst % (2 * kNormChunk) == 0 &&
              kFirst % kElementChunk == 0 && static_cast<int32_t>(kFirst) < 0);

// A huge array of zeros, of which the elements from kFirst / group on have the values of `data`.
class Huge {
 public:
  Huge(const void* data, int64_t numel, int64_t size_bytes, int64_t group = 1)
      : wrap_bytes_(kWrap / group * size_bytes), first_bytes_(kFirst / group * size_bytes), data_bytes_(numel * size_bytes) {
    reserved_ = static_cast<size_t>(wrap_bytes_ + first_bytes_ + data_bytes_);
    memory_ = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    std::memcpy(element0() + first_bytes_, data, static_cast<size_t>(data_bytes_));
  }
  Huge(const Huge&) = delete;
  ~Huge() { munmap(memory_, reserved_); }
  // Element 0; wrapped: the place from which an element's index leads where the index cut to 32 bits would lead from element 0.
  char* element0(bool wrapped = false) { return static_cast<char*>(memory_) + (wrapped ? 0 : wrap_bytes_); }
  void copy_to(void* data) { std::memcpy(data, element0() + first_bytes_, static_cast<size_t>(data_bytes_)); }

 private:
  void* memory_ = nullptr;
  size_t reserved_ = 0;
  int64_t wrap_bytes_, first_bytes_, data_bytes_;
};

// Gives work from item `first` on only: what comes before would walk through gigabytes of zeros.
class TailExecutor final : public Executor {
 public:
  explicit TailExecutor(int64_t first) : first_(first) {}
  void parallel_for(int64_t /*begin*/, int64_t end, int64_t /*grain*/, const RangeFn& fn) override { fn(first_, end); }

 private:
  int64_t first_;
};

// The pointers of a segment, with bytes of an element and elements of an item (256 for scales).
struct Stream {
  const char* name;
  void** pointer;
  int64_t size_bytes;
  int64_t group;
};

std::vector<Stream> streams_of(AdamSegment& t) {
  const auto as_void = [](auto** pointer) { return reinterpret_cast<void**>(pointer); };
  const int64_t state = itemsize(t.state_dtype);
  const std::vector<Stream> all = {{"param", &t.param, itemsize(t.param_dtype), 1},
                                   {"grad", const_cast<void**>(&t.grad), itemsize(t.grad_dtype), 1},
                                   {"exp_avg", &t.exp_avg, state, 1},
                                   {"exp_avg_sq", &t.exp_avg_sq, state, 1},
                                   {"master", &t.master, t.master_kind == Master::split ? 2 : 4, 1},
                                   {"max_exp_avg_sq", as_void(&t.max_exp_avg_sq), 4, 1},
                                   {"exp_avg_scale", as_void(&t.exp_avg_scale), 4, kBlock},
                                   {"exp_avg_sq_scale", as_void(&t.exp_avg_sq_scale), 4, kBlock}};
  std::vector<Stream> used;
  for (const Stream& stream : all) {
    if (*stream.pointer != nullptr) used.push_back(stream);
  }
  return used;
}

// Runs the problem's one segment as the end of a huge tensor. wrapped: the stream whose indices are as if cut to 32 bits, or
// -1.
std::vector<std::vector<uint8_t>> run_huge(AdamProblem& problem, bool cuda, int wrapped) {
  problem.reset();
  const AdamSegment small = problem.segments()[0];
  AdamSegment& t = problem.segments()[0];
  std::deque<Huge> huge;
  std::vector<void*> home;
  int index = 0;
  for (const Stream& stream : streams_of(t)) {
    home.push_back(*stream.pointer);
    huge.emplace_back(*stream.pointer, stream.group == 1 ? small.numel : blocks_of(small.numel), stream.size_bytes,
                      stream.group);
    *stream.pointer = huge.back().element0(index++ == wrapped);
  }
  t.numel = kFirst + small.numel;
  t.first_element = small.first_element - kFirst;
  if (cuda) {
    problem.first_chunk = kFirst / kAdamChunk;
    problem.run_cuda_body(various_hypers());
    problem.first_chunk = 0;
  } else {
    TailExecutor executor(kFirst / kBlock);
    problem.run_cpu(various_hypers(), executor);
  }
  t = small;
  for (size_t i = 0; i < huge.size(); ++i) huge[i].copy_to(home[i]);
  return problem.result();
}

std::vector<TensorSpec> every_kind(int64_t numel) {
  std::vector<TensorSpec> specs = every_reduced_mix(numel, 0);
  for (const DType param : kDTypes) {
    for (const Master master : {Master::none, Master::f32}) specs.push_back({numel, param, DType::f32, master, true});
  }
  for (TensorSpec& spec : specs) spec.first_element = kFirst;
  return specs;
}

TEST(large_index, adam_beyond_2_to_the_31_has_the_bits_of_a_small_tensor_for_every_kind) {
  for (const TensorSpec& spec : every_kind(kAdamChunk + 300)) {
    AdamProblem problem({spec}, 50);
    problem.run_cpu(various_hypers());
    const auto want = problem.result();
    for (const bool cuda : {false, true}) {
      ASSERT_TRUE(run_huge(problem, cuda, -1) == want) << (cuda ? "CUDA body" : "CPU") << ", param " << int(spec.param)
                                                       << ", state " << int(spec.state) << ", master " << int(spec.master);
    }
  }
}

TEST(large_index, an_adam_index_of_32_bits_is_rejected_in_every_stream) {
  for (const TensorSpec& spec : every_kind(600)) {
    if (spec.grad != DType::f32) continue;
    AdamProblem problem({spec}, 51);
    problem.run_cpu(various_hypers());
    const auto want = problem.result();
    const auto streams = streams_of(problem.segments()[0]);
    for (size_t i = 0; i < streams.size(); ++i) {
      for (const bool cuda : {false, true}) {
        EXPECT_FALSE(run_huge(problem, cuda, static_cast<int>(i)) == want)
            << streams[i].name << (cuda ? ", CUDA body" : ", CPU") << ", state " << int(spec.state);
      }
    }
  }
}

constexpr int64_t kTail = 256 * kBlock + 77;  // past a group of blocks

std::vector<float> tail_values() {
  Random random(52);
  std::vector<float> values;
  for (int64_t i = 0; i < kTail; ++i) values.push_back(random.normal());
  return values;
}

TEST(large_index, the_norm_beyond_2_to_the_31) {
  const std::vector<float> source = tail_values();
  SerialExecutor serial;
  for (const DType dtype : kDTypes) {  // each has a chunk size of its own on CUDA
    Buffer values(kTail * itemsize(dtype), 0);
    for (int64_t i = 0; i < kTail; ++i) store_from_f32(values.data(), dtype, i, source[static_cast<size_t>(i)]);
    const NormSegment small{values.data(), kTail, dtype};
    const DoubleDouble want = sq_norm_cpu(&small, 1, serial);
    Huge huge(values.data(), kTail, itemsize(dtype));
    for (const bool wrapped : {false, true}) {
      const NormSegment t{huge.element0(wrapped), kFirst + kTail, dtype};
      TailExecutor executor(kFirst / (256 * kBlock));  // the norm's work items are groups of blocks
      const DoubleDouble got = sq_norm_cpu(&t, 1, executor);
      EXPECT_EQ(got.high == want.high && got.low == want.low, !wrapped);
      const DoubleDouble cuda = sq_norm_cuda_body({t}, kFirst / norm_chunk(dtype));
      EXPECT_EQ(relative_difference(want, cuda) <= kGrouping, !wrapped);
    }
  }
}

TEST(large_index, casts_and_ordered_sums_beyond_2_to_the_31) {
  const std::vector<float> values = tail_values();
  const std::vector<uint16_t> none(static_cast<size_t>(kTail));
  SerialExecutor serial;
  std::vector<uint16_t> want(none), got(none);
  const ElementSegment small = assignment(want.data(), DType::bf16, values.data(), DType::f32, kTail);
  update_elements_cpu(&small, 1, kAssign, serial);
  OrderedSum op{};
  op.piece_dtype = DType::f32, op.world_size = 1, op.scale = 0.25, op.out_dtype = DType::bf16;
  std::vector<uint16_t> want_sum(none), got_sum(none);
  op.pieces = values.data(), op.numel = kTail, op.out = want_sum.data();
  ordered_sum_cpu(op, serial);
  for (const auto& [src_wrapped, dst_wrapped] : {std::pair{false, false}, {true, false}, {false, true}}) {
    Huge src(values.data(), kTail, 4), dst(none.data(), kTail, 2);
    const ElementSegment t =
        assignment(dst.element0(dst_wrapped), DType::bf16, src.element0(src_wrapped), DType::f32, kFirst + kTail);
    TailExecutor blocks(kFirst / kBlock);
    update_elements_cpu(&t, 1, kAssign, blocks);
    dst.copy_to(got.data());
    EXPECT_EQ(got == want, !src_wrapped && !dst_wrapped);
    std::memset(dst.element0() + kFirst * 2, 0, static_cast<size_t>(kTail * 2));
    element_cuda_body({t}, kAssign, kFirst / kElementChunk);
    dst.copy_to(got.data());
    EXPECT_EQ(got == want, !src_wrapped && !dst_wrapped);
    Huge sum(none.data(), kTail, 2);
    op.pieces = src.element0(src_wrapped), op.numel = kFirst + kTail, op.out = sum.element0(dst_wrapped);
    TailExecutor groups(kFirst / (256 * kBlock));
    ordered_sum_cpu(op, groups);
    sum.copy_to(got_sum.data());
    EXPECT_EQ(got_sum == want_sum, !src_wrapped && !dst_wrapped);
    std::memset(sum.element0() + kFirst * 2, 0, static_cast<size_t>(kTail * 2));
    ordered_sum_cuda_body(op, kFirst / ordered_sum_chunk(op.numel));
    sum.copy_to(got_sum.data());
    EXPECT_EQ(got_sum == want_sum, !src_wrapped && !dst_wrapped);
  }
}

}  // namespace
}  // namespace shardcore::testing

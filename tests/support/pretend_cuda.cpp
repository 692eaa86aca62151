// A pretended GPU of torch's device type "cuda" in host memory, for a build of torch without CUDA.
//
// It refuses what CUDA refuses, operations on tensors of two devices, and finds races of streams. Operations run at once, on
// the CPU, on views of the same memory; but for each stream a clock (how far it knows the others to be) says which earlier
// operations are over when one begins, and a use of memory that one which may not be over writes, or a write of what it uses,
// raises (Lamport's clocks, as race detectors of threads use them). Freed memory goes, with its uses, to the next tensors of
// the stream that it was made on, as torch's allocator does. New memory is NaN, so that what is read before it was written
// shows.
//
// It is to be loaded before torch is imported (LD_PRELOAD). tests/support/pretend_cuda.py makes torch.cuda of it.
// Source: torch's test/cpp_extensions/open_registration_extension, and torch.cuda._sanitizer.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;
const c10::Device kDevice{kCuda, 0};

// --- streams and the uses of memory ---

using Clock = std::vector<int64_t>;  // by stream: how many of its operations are over

bool is_over(const Clock& clock, int stream, int64_t number) {
  return stream < static_cast<int>(clock.size()) && clock[stream] >= number;
}

void merge(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

struct Use {
  uintptr_t begin, end;
  int stream;
  int64_t number;
  bool writes;
  std::string by;
};

struct Block {
  uintptr_t end;
  int stream;  // that it was made on
  std::vector<Use> uses;
  std::set<int> recorded;  // by record_stream: the allocator waits for these
};

thread_local int current = 0;
thread_local std::string running = "?";

class Streams {
 public:
  int make() {
    const std::lock_guard<std::mutex> lock(mutex_);
    clocks_.emplace_back();
    return static_cast<int>(clocks_.size()) - 1;
  }

  // An operation begins on the current stream: what the host has waited for is over.
  void launch(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running = name;
    Clock& clock = clocks_[current];
    merge(clock, host_);
    clock.resize(std::max(clock.size(), clocks_.size()));
    ++clock[current];
  }

  // The operation that runs uses memory.
  void use(const void* data, size_t bytes, bool writes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const auto found = blocks_.upper_bound(begin);
    if (bytes == 0 || found == blocks_.begin()) {
      return;
    }
    Block& block = std::prev(found)->second;
    const Clock& clock = clocks_[current];
    const Use mine{begin, begin + bytes, current, clock[current], writes, running};
    std::string what;
    for (const Use& other : block.uses) {
      const bool meets = other.begin < mine.end && mine.begin < other.end && (writes || other.writes);
      if (meets && !is_over(clock, other.stream, other.number)) {
        what = c10::str("pretended GPU: ", running, ", on stream ", current, ", ", writes ? "writes" : "reads", " what ",
                        other.by, ", on stream ", other.stream, ", ", other.writes ? "writes" : "reads", " and may not have ",
                        other.writes ? "written" : "read", " yet; expected a wait for that stream (or its event) before");
        break;
      }
    }
    TORCH_CHECK(what.empty(), what);
    auto& uses = block.uses;  // a write that is over replaces what it covers; a read what the stream read there before
    uses.erase(std::remove_if(uses.begin(), uses.end(),
                              [&](const Use& other) {
                                return mine.begin <= other.begin && other.end <= mine.end &&
                                       (writes || (!other.writes && other.stream == current));
                              }),
               uses.end());
    uses.push_back(mine);
  }

  void allocated(void* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    Block block{begin + bytes, current, {}, {}};
    Clock clock = clocks_[current];
    merge(clock, host_);
    std::vector<Use>& left = freed_[current];
    left.erase(std::remove_if(left.begin(), left.end(), [&](const Use& use) { return is_over(clock, use.stream, use.number); }),
               left.end());
    for (Use use : left) {
      use.begin = begin;
      use.end = begin + bytes;
      block.uses.push_back(use);
    }
    blocks_[begin] = std::move(block);
  }

  void freed(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<uintptr_t>(data));
    if (found == blocks_.end()) {
      return;
    }
    for (Use& use : found->second.uses) {
      if (use.stream != found->second.stream && found->second.recorded.count(use.stream) == 0) {
        use.by += " (of memory that was freed since)";
        freed_[found->second.stream].push_back(use);
      }
    }
    blocks_.erase(found);
  }

  void record_stream(const void* data, int stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.upper_bound(reinterpret_cast<uintptr_t>(data));
    if (found != blocks_.begin()) {
      std::prev(found)->second.recorded.insert(stream);
    }
  }

  Clock clock(int stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Clock clock = clocks_[stream];
    merge(clock, host_);
    return clock;
  }

  void wait(int stream, const Clock& clock) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge(clocks_[stream], clock);
  }

  void host_waits(const Clock& clock) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge(host_, clock);
  }

  Clock all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Clock latest = host_;
    for (const Clock& clock : clocks_) {
      merge(latest, clock);
    }
    return latest;
  }

 private:
  std::mutex mutex_;
  std::vector<Clock> clocks_{Clock{}};
  Clock host_;
  std::map<uintptr_t, Block> blocks_;      // by start
  std::map<int, std::vector<Use>> freed_;  // by the stream whose next tensors may get that memory
};

Streams& streams() {
  static Streams* const all = new Streams;  // memory is freed until the very end
  return *all;
}

// --- the device ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::UNSAFE, kDevice, current); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, std::exchange(current, static_cast<int>(stream.id())));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Clock*>(*event);
    *event = new Clock(streams().clock(static_cast<int>(stream.id())));
  }
  void block(void* event, const c10::Stream& stream) const override {
    streams().wait(static_cast<int>(stream.id()), *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    streams().record_stream(data.get(), static_cast<int>(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      if (posix_memalign(&memory, 512, bytes) != 0) {
        throw std::bad_alloc();
      }
      std::memset(memory, 0xff, bytes);
      streams().allocated(memory, bytes);
    }
    return {memory, memory, &release, kDevice};
  }
  static void release(void* memory) {
    if (memory != nullptr) {
      streams().freed(memory);
      std::free(memory);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};
Memory memory;

struct CUDAHooks final : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

const bool registered = [] {
  c10::SetAllocator(kCuda, &memory);
  return true;
}();

// --- tensors ---

// A CPU tensor over the memory of `tensor`; what is written to it counts in the version of `tensor`, too.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().type() != kCuda) {
    return tensor;
  }
  void* data = tensor.numel() > 0 ? tensor.data_ptr() : nullptr;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto view = at::from_blob(
      data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
  if (!tensor.is_inference() && !view.is_inference()) {
    view.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return view;
}

// The operation that runs uses what lies between the first and the last element.
void use(const at::Tensor& tensor, bool writes) {
  if (tensor.defined() && tensor.device().type() == kCuda && tensor.numel() > 0) {
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    streams().use(tensor.const_data_ptr(), (last + 1) * tensor.element_size(), writes);
  }
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, keys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory, keys,
                                           dtype.value_or(at::kFloat));
}

// To host memory without a wait of the host: written when it waits, as late as may be.
struct Late {
  int stream;
  int64_t number;
  at::Tensor target, values;
};
std::vector<Late> late;
std::mutex late_mutex;

void host_waits(const Clock& clock) {
  streams().host_waits(clock);
  const std::lock_guard<std::mutex> lock(late_mutex);
  for (auto copy = late.begin(); copy != late.end();) {
    if (is_over(clock, copy->stream, copy->number)) {
      copy->target.copy_(copy->values);
      copy = late.erase(copy);
    } else {
      ++copy;
    }
  }
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  streams().launch("copy_");
  use(source, false);
  use(target, true);
  if (target.device().type() == kCuda) {
    host_view(target).copy_(host_view(source));
  } else if (non_blocking) {
    const std::lock_guard<std::mutex> lock(late_mutex);
    late.push_back({current, streams().clock(current)[current], target, host_view(source).clone()});
    target.fill_(target.is_floating_point() ? at::Scalar(std::nan("")) : at::Scalar(1));
  } else {
    target.copy_(host_view(source));
    host_waits(streams().clock(current));
  }
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor into = target;
  return copy(into, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  streams().launch("item");
  use(tensor, false);
  host_waits(streams().clock(current));
  return at::_local_scalar_dense(host_view(tensor));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  streams().record_stream(tensor.const_data_ptr(), static_cast<int>(stream.id()));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) {
    start = offset->guard_int(__FILE__, __LINE__);
  }
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  const int64_t start = offset.guard_int(__FILE__, __LINE__);
  return at::native::set_storage_cpu_(tensor, std::move(storage), start, C10_AS_INTARRAYREF_SLOW(sizes),
                                      C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_storage_cpu_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto& storage = tensor.storage();
  const size_t bytes = (c10::multiply_integers(wanted) + tensor.storage_offset()) * tensor.itemsize();
  if (storage.nbytes() < bytes) {
    auto larger = memory.allocate(bytes);
    if (storage.nbytes() > 0) {
      std::memcpy(larger.get(), storage.data(), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return tensor;
}

// --- every other operation ---

// As on CUDA: CPU tensors only as numbers, as indices (which come in lists of another kind), and where values are copied.
void refuse_cpu(const std::string& name, const at::Tensor& tensor) {
  const bool fits = !tensor.defined() || tensor.device().type() == kCuda || tensor.dim() == 0;
  TORCH_CHECK(fits || name == "aten::_foreach_copy_", "pretended GPU: ", name, " got a tensor of shape ", tensor.sizes(),
              " on ", tensor.device(), "; expected all tensors on one device");
}

// A tensor on the device with the values and strides of one on the CPU.
at::Tensor on_device(const at::Tensor& made) {
  at::Tensor there = at::empty_strided(made.sizes(), made.strides(), made.options().device(kDevice));
  use(there, true);
  host_view(there).copy_(made);
  return there;
}

c10::IValue with_each(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value.toTensor();
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> all = value.toTensorVector();
    std::transform(all.begin(), all.end(), all.begin(), change);
    return all;
  }
  if (value.isOptionalTensorList()) {
    auto all = value.toOptionalTensorVector();
    for (auto& one : all) {
      one = one && one->defined() ? std::optional<at::Tensor>(change(*one)) : one;
    }
    return all;
  }
  return value;
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - static_cast<int64_t>(count), stack->end());
  streams().launch(name);
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!given[i].isOptionalTensorList()) {
      with_each(given[i], [&](const at::Tensor& tensor) { return refuse_cpu(name, tensor), tensor; });
    }
    c10::IValue& mine = (*stack)[stack->size() - count + i];
    mine = with_each(given[i], [&](const at::Tensor& tensor) {
      use(tensor, alias != nullptr && alias->isWrite());
      const bool to_be_sized = schema.arguments()[i].is_out() && tensor.numel() == 0;
      return to_be_sized ? at::empty({0}, tensor.options().device(at::kCPU)) : host_view(tensor);
    });
    if (given[i].isDevice()) {
      mine = c10::Device(at::kCPU);
    }
  }
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& result = (*stack)[stack->size() - results + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias == nullptr) {
      result = with_each(result, on_device);
      continue;
    }
    for (size_t j = 0; j < count; ++j) {
      const auto* of = schema.arguments()[j].alias_info();
      if (of != nullptr && of->beforeSets() == alias->beforeSets()) {
        if (!alias->isWrite()) {  // a view
          const at::Tensor view = result.toTensor(), base = given[j].toTensor();
          result = base.as_strided(view.sizes(), view.strides(), base.storage_offset() + view.storage_offset());
          break;
        }
        if (schema.arguments()[j].is_out() && given[j].toTensor().sizes() != result.toTensor().sizes()) {
          given[j].toTensor().resize_(result.toTensor().sizes());
          host_view(given[j].toTensor()).copy_(result.toTensor());
        }
        result = given[j];
      }
    }
  }
}

TORCH_LIBRARY(pretend_cuda, library) {
  library.def("host_view", &host_view);
  library.def("use", &use);
  library.def("launch", [](const std::string& name) { streams().launch(name); });
  library.def("new_stream", [](int64_t) -> int64_t { return streams().make(); });
  library.def("current_stream", []() -> int64_t { return current; });
  library.def("set_stream", [](int64_t stream) { current = static_cast<int>(stream); });
  library.def("clock", [](int64_t stream) { return streams().clock(static_cast<int>(stream)); });
  library.def("wait",
              [](int64_t stream, const std::vector<int64_t>& clock) { streams().wait(static_cast<int>(stream), clock); });
  library.def("host_waits", [](const std::vector<int64_t>& clock) { host_waits(clock); });
  library.def("synchronize", []() { host_waits(streams().all()); });
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("resize_", &resize);
  // For which other devices have a formula of several operations, with bits of its own.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace

// A device of torch's ("PrivateUse1") in host memory, which refuses what CUDA refuses: operations on tensors of two devices.
//
// Operations run on the CPU, on views of the same memory. New memory is NaN, so that what is read before it was written shows.
// tests/support/pretend_device.py makes shardcore use it. Source: torch's test/cpp_extensions/open_registration_extension.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <string>

namespace {

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
const c10::Device kDevice{kPretend, 0};

// --- the device ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kPretend; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      if (posix_memalign(&memory, 512, bytes) != 0) {
        throw std::bad_alloc();
      }
      std::memset(memory, 0xff, bytes);
    }
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};
Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
Hooks hooks;

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kPretend, &memory);
  return true;
}();

// --- tensors ---

// A CPU tensor over the memory of `tensor`; what is written to it counts in the version of `tensor`, too.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().type() != kPretend) {
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

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, keys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory, keys,
                                           dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  host_view(target).copy_(host_view(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) { return at::_local_scalar_dense(host_view(tensor)); }

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
  const bool fits = !tensor.defined() || tensor.device().type() == kPretend || tensor.dim() == 0;
  TORCH_CHECK(fits || name == "aten::_foreach_copy_", "pretended device: ", name, " got a tensor of shape ", tensor.sizes(),
              " on ", tensor.device(), "; expected all tensors on one device");
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& name = operation.schema().name();
  for (const auto& argument : torch::jit::last(*stack, operation.schema().arguments().size())) {
    if (argument.isTensor()) {
      refuse_cpu(name, argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        refuse_cpu(name, tensor);
      }
    }
  }
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY(pretend_device, library) { library.def("host_view", &host_view); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
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

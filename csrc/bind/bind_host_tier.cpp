// HostTier and empty_huge.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "bind/checks.h"
#include "bind/initialized.h"
#include "copy/host_memory.h"
#include "copy/host_tier.h"

#ifdef SHARDCORE_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace shardcore::bind {
namespace {

int64_t checked_bytes(const char* op, int64_t numel, at::ScalarType dtype) {
  if (numel < 0) value_error({op, "numel"}, numel, "; expected 0 or more");
  const int64_t item = static_cast<int64_t>(c10::elementSize(dtype));
  if (numel > INT64_MAX / item) value_error({op, "numel"}, numel, "; expected at most ", INT64_MAX / item);
  return numel * item;
}

[[noreturn]] void no_memory(const char* op, int64_t size_bytes) {
  PyErr_Format(PyExc_MemoryError, "%s: numel has %lld bytes; expected what this machine can give (free memory, or take less)",
               op, static_cast<long long>(size_bytes));
  throw py::error_already_set();
}

at::Tensor empty_huge(const py::handle& numel_object, const py::handle& dtype_object) {
  const int64_t numel = int_of({"empty_huge", "numel"}, numel_object);
  const at::ScalarType dtype = dtype_of({"empty_huge", "dtype"}, dtype_object);
  const int64_t size_bytes = checked_bytes("empty_huge", numel, dtype);
  if (size_bytes == 0) return at::empty({0}, at::TensorOptions().dtype(dtype));
  void* data = nullptr;
  try {
    data = allocate_pages(size_bytes);
  } catch (const std::bad_alloc&) {
    no_memory("empty_huge", size_bytes);
  }
  return at::from_blob(
      data, {numel}, [size_bytes](void* p) { free_pages(p, size_bytes); }, at::TensorOptions().dtype(dtype));
}

}  // namespace

class __attribute__((visibility("hidden"))) PyHostTier {
 public:
  PyHostTier(const py::handle& device_object, const py::handle& pin_memory_object)
      : device_(device_of({"HostTier", "device"}, device_object)) {
    [[maybe_unused]] const bool pin_memory = bool_of({"HostTier", "pin_memory"}, pin_memory_object);
    const at::Device device = device_;
    check_device_supported({"HostTier", "device"}, device);
    std::unique_ptr<CopyBackend> backend;
    if (device.is_cpu()) {
      device_ = at::Device(at::kCPU);
      backend = make_thread_backend();  // pin_memory has no meaning: no GPU reads these buffers
    }
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) {
      if (!device.has_index()) device_ = at::Device(at::kCUDA, c10::cuda::current_device());
      backend = make_cuda_backend(device_.index(), pin_memory);
    }
#endif
    tier_ = std::make_shared<HostTier>(std::move(backend));
  }

  at::Tensor empty(const py::handle& numel_object, const py::handle& dtype_object) {
    const int64_t numel = int_of({"HostTier.empty", "numel"}, numel_object);
    const at::ScalarType dtype = dtype_of({"HostTier.empty", "dtype"}, dtype_object);
    const int64_t size_bytes = checked_bytes("HostTier.empty", numel, dtype);
    if (size_bytes == 0) return at::empty({0}, at::TensorOptions().dtype(dtype));
    void* data = nullptr;
    try {
      data = tier_->allocate(size_bytes);
    } catch (const std::bad_alloc&) {
      no_memory("HostTier.empty", size_bytes);
    }
    return at::from_blob(
        data, {numel}, [tier = tier_](void* p) { tier->release(p); }, at::TensorOptions().dtype(dtype));
  }

  void to_tier(const py::handle& dst, const py::handle& src) { copy("HostTier.to_tier", dst, src, true); }
  void from_tier(const py::handle& dst, const py::handle& src) { copy("HostTier.from_tier", dst, src, false); }

  void synchronize() {
    const py::gil_scoped_release no_gil;
    tier_->synchronize();
  }

  const HostTier& tier() const { return *tier_; }

 private:
  void copy(const char* op, const py::handle& dst_object, const py::handle& src_object, bool to) {
    const at::Tensor dst = tensor_of(op, "dst", dst_object);
    const at::Tensor src = tensor_of(op, "src", src_object);
    check_layout({op, "dst"}, dst, to ? at::Device(at::kCPU) : device_);
    check_layout({op, "src"}, src, to ? device_ : at::Device(at::kCPU));
    if (src.scalar_type() != dst.scalar_type()) {
      type_error({op, "src"}, "dtype ", src.scalar_type(), "; expected ", dst.scalar_type(), " (as dst: copies do not cast)");
    }
    check_numel({op, "src"}, src, dst.numel(), "dst");
    const int64_t size_bytes = static_cast<int64_t>(dst.nbytes());
    if (size_bytes == 0) return;
    const at::Tensor& ours = to ? dst : src;
    if (!tier_->owns(ours.const_data_ptr(), size_bytes)) {
      value_error({op, to ? "dst" : "src"},
                  "memory that this tier did not make; expected a buffer of this tier (from its empty(), or a view of one)");
    }
    if (device_.is_cpu()) {
      const auto* d = static_cast<const char*>(dst.const_data_ptr());
      const auto* s = static_cast<const char*>(src.const_data_ptr());
      if (d < s + size_bytes && s < d + size_bytes)
        value_error({op, "src"}, "memory that dst has too; expected two distinct buffers");
    }
    mark_written(dst);
    const py::gil_scoped_release no_gil;
    void* stream = nullptr;
#ifdef SHARDCORE_WITH_CUDA
    const c10::cuda::OptionalCUDAGuard guard(device_.is_cuda() ? std::optional<at::Device>(device_) : std::nullopt);
    if (device_.is_cuda()) stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
#endif
    void* const d = dst.data_ptr();
    const void* const s = src.const_data_ptr();
    if (to) {
      tier_->to_tier(d, s, size_bytes, stream, torch_executor());
    } else {
      tier_->from_tier(d, s, size_bytes, stream, torch_executor());
    }
  }

  at::Device device_;
  std::shared_ptr<HostTier> tier_;
};

void bind_host_tier(py::module_& module) {
  module.def("empty_huge", &empty_huge, py::arg("numel"), py::arg("dtype"));
  py::class_<PyHostTier>(module, "HostTier")
      .def(py::init<const py::handle&, const py::handle&>(), py::arg("device"), py::arg("pin_memory") = false)
      .def("empty", &PyHostTier::empty, py::arg("numel"), py::arg("dtype"))
      .def("to_tier", &PyHostTier::to_tier, py::arg("dst"), py::arg("src"))
      .def("from_tier", &PyHostTier::from_tier, py::arg("dst"), py::arg("src"))
      .def("synchronize", &PyHostTier::synchronize)
      .def_property_readonly("bytes_to_tier", [](const PyHostTier& t) { return t.tier().bytes_to_tier(); })
      .def_property_readonly("bytes_from_tier", [](const PyHostTier& t) { return t.tier().bytes_from_tier(); })
      .def_property_readonly("bytes_allocated", [](const PyHostTier& t) { return t.tier().bytes_allocated(); });
}

}  // namespace shardcore::bind

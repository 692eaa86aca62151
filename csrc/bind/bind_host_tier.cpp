// HostTier, CopyEvent and empty_huge.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <optional>

#include "bind/checks.h"
#include "bind/host_copies.h"
#include "copy/copy_thread.h"
#include "copy/host_memory.h"
#include "copy/host_tier.h"

#ifdef SHARDCORE_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
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

// A byte count or the like that may be None; then `otherwise`.
int64_t count_of(const Where& where, const py::handle& object, int64_t otherwise) {
  if (object.is_none()) return otherwise;
  const int64_t value = int_of(where, object);
  if (value < 0) value_error(where, value, "; expected 0 or more, or None");
  return value;
}

}  // namespace

class __attribute__((visibility("hidden"))) PyHostTier {
 public:
  PyHostTier(const py::handle& device_object, const py::handle& pin_object, const py::handle& limit_object,
             const py::handle& gigabytes_object, const py::handle& failing_object, const py::handle& late_object,
             const py::handle& pinnable_object) {
    at::Device device = device_of({"HostTier", "device"}, device_object);
    const bool pin_memory = bool_of({"HostTier", "pin_memory"}, pin_object);
    const int64_t limit = count_of({"HostTier", "pin_memory_limit"}, limit_object, -1);
    Simulation simulation;
    if (!gigabytes_object.is_none()) {
      const Where where{"HostTier", "gigabytes_per_second"};
      simulation.bytes_per_second = 1e9 * number_of(where, gigabytes_object);
      if (!(simulation.bytes_per_second > 0)) {
        value_error(where, simulation.bytes_per_second / 1e9, "; expected a number above 0, or None");
      }
    }
    simulation.failing_copy = count_of({"HostTier", "failing_copy"}, failing_object, 0);
    simulation.late = bool_of({"HostTier", "late"}, late_object);
    simulation.pinnable_bytes = count_of({"HostTier", "pinnable_bytes"}, pinnable_object, -1);
    check_device_supported({"HostTier", "device"}, device);
    std::unique_ptr<CopyBackend> backend;
    if (device.is_cpu()) {
      device = at::Device(at::kCPU);
      backend = make_thread_backend(simulation);
    } else if (simulation.bytes_per_second > 0 || simulation.failing_copy > 0 || simulation.late ||
               simulation.pinnable_bytes >= 0) {
      value_error({"HostTier", "device"}, "device ", device.str(), " with a simulated link; expected cpu");
    }
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) {
      if (!device.has_index()) device = at::Device(at::kCUDA, c10::cuda::current_device());
      const c10::cuda::CUDAGuard guard(device);
      backend = make_cuda_backend(device.index());
    }
#endif
    copies_ = std::make_shared<Copies>(std::make_shared<HostTier>(std::move(backend), pin_memory, limit), device);
  }

  at::Tensor empty(const py::handle& numel_object, const py::handle& dtype_object, const py::handle& pinned_object) {
    const int64_t numel = int_of({"HostTier.empty", "numel"}, numel_object);
    const at::ScalarType dtype = dtype_of({"HostTier.empty", "dtype"}, dtype_object);
    const bool pinned = bool_of({"HostTier.empty", "pinned"}, pinned_object);
    const int64_t size_bytes = checked_bytes("HostTier.empty", numel, dtype);
    if (size_bytes == 0) return at::empty({0}, at::TensorOptions().dtype(dtype));
    void* data = nullptr;
    try {
      const py::gil_scoped_release no_gil;  // locking pages takes a while
      data = copies_->tier->allocate(size_bytes, pinned);
    } catch (const std::bad_alloc&) {
      no_memory("HostTier.empty", size_bytes);
    }
    return at::from_blob(
        data, {numel}, [tier = copies_->tier](void* p) { tier->release(p); }, at::TensorOptions().dtype(dtype));
  }

  PyCopyEvent to_tier(const py::handle& dst, const py::handle& src) {
    return copy("HostTier.to_tier", dst, src, Direction::to_tier);
  }
  PyCopyEvent from_tier(const py::handle& dst, const py::handle& src) {
    return copy("HostTier.from_tier", dst, src, Direction::from_tier);
  }

  void synchronize() {
    {
      const py::gil_scoped_release no_gil;
      copies_->tier->synchronize();
    }
    copies_->let_go();
  }

  void drain() {
    {
      const py::gil_scoped_release no_gil;
      copies_->tier->drain(/*hurry=*/false);
    }
    copies_->let_go();
  }

  const HostTier& tier() const { return *copies_->tier; }
  const std::shared_ptr<Copies>& copies() const { return copies_; }

 private:
  PyCopyEvent copy(const char* op, const py::handle& dst_object, const py::handle& src_object, Direction direction) {
    const at::Device device = copies_->device;
    const at::Tensor dst = tensor_of(op, "dst", dst_object);
    const at::Tensor src = tensor_of(op, "src", src_object);
    check_copy(*copies_->tier, device, direction, {op, "dst"}, dst, {op, "src"}, src);
    const auto size_bytes = static_cast<int64_t>(dst.nbytes());
    if (size_bytes == 0) return {copies_, direction, 0};
    const at::Tensor& ours = direction == Direction::to_tier ? dst : src;
    mark_written(dst);
    copies_->let_go();
    int64_t number = 0;
    {
      void* const d = dst.data_ptr();
      const void* const s = src.const_data_ptr();
      std::optional<py::gil_scoped_release> no_gil;
      if (!copies_->tier->queues(ours.const_data_ptr())) no_gil.emplace();  // it may wait for the device
      number = copies_->tier->copy(direction, d, s, size_bytes, copies_->current_stream());
    }
    copies_->keep(direction, number, dst, src);
    return {copies_, direction, number};
  }

  std::shared_ptr<Copies> copies_;
};

std::shared_ptr<Copies> copies_of(const Where& where, const py::handle& object) {
  if (!py::isinstance<PyHostTier>(object)) type_error(where, "type ", Py_TYPE(object.ptr())->tp_name, "; expected HostTier");
  return object.cast<const PyHostTier&>().copies();
}

void check_copy(const HostTier& tier, at::Device device, Direction direction, const Where& dst_where, const at::Tensor& dst,
                const Where& src_where, const at::Tensor& src) {
  const bool to = direction == Direction::to_tier;
  check_layout(dst_where, dst, to ? at::Device(at::kCPU) : device);
  check_layout(src_where, src, to ? device : at::Device(at::kCPU));
  if (src.scalar_type() != dst.scalar_type()) {
    type_error(src_where, "dtype ", src.scalar_type(), "; expected ", dst.scalar_type(), " (as ", dst_where.name,
               ": copies do not cast)");
  }
  check_numel(src_where, src, dst.numel(), dst_where.name);
  const auto size_bytes = static_cast<int64_t>(dst.nbytes());
  if (size_bytes == 0) return;
  if (!tier.owns((to ? dst : src).const_data_ptr(), size_bytes)) {
    value_error(to ? dst_where : src_where,
                "memory that this tier did not make; expected a buffer of this tier (from its empty(), or a view of one)");
  }
  if (device.is_cpu()) {
    const auto* d = static_cast<const char*>(dst.const_data_ptr());
    const auto* s = static_cast<const char*>(src.const_data_ptr());
    if (d < s + size_bytes && s < d + size_bytes) {
      value_error(src_where, "memory that ", dst_where.name, " has too; expected two distinct buffers");
    }
  }
}

void bind_host_tier(py::module_& module) {
  module.def("empty_huge", &empty_huge, py::arg("numel"), py::arg("dtype"));
  py::class_<PyCopyEvent>(module, "CopyEvent")
      .def("query", &PyCopyEvent::query)
      .def("synchronize", &PyCopyEvent::synchronize)
      .def("wait", &PyCopyEvent::wait);
  py::class_<PyHostTier>(module, "HostTier")
      .def(py::init<const py::handle&, const py::handle&, const py::handle&, const py::handle&, const py::handle&,
                    const py::handle&, const py::handle&>(),
           py::arg("device"), py::arg("pin_memory") = false, py::arg("pin_memory_limit") = py::none(), py::kw_only(),
           py::arg("gigabytes_per_second") = py::none(), py::arg("failing_copy") = py::none(), py::arg("late") = false,
           py::arg("pinnable_bytes") = py::none())
      .def("empty", &PyHostTier::empty, py::arg("numel"), py::arg("dtype"), py::arg("pinned") = true)
      .def("to_tier", &PyHostTier::to_tier, py::arg("dst"), py::arg("src"))
      .def("from_tier", &PyHostTier::from_tier, py::arg("dst"), py::arg("src"))
      .def("synchronize", &PyHostTier::synchronize)
      .def("drain", &PyHostTier::drain)
      .def_property_readonly("caller_copies", [](const PyHostTier& t) { return t.tier().caller_copies(); })
      .def_property_readonly("bytes_to_tier", [](const PyHostTier& t) { return t.tier().bytes_to_tier(); })
      .def_property_readonly("bytes_from_tier", [](const PyHostTier& t) { return t.tier().bytes_from_tier(); })
      .def_property_readonly("bytes_allocated", [](const PyHostTier& t) { return t.tier().bytes_allocated(); })
      .def_property_readonly("bytes_pinned", [](const PyHostTier& t) { return t.tier().bytes_pinned(); })
      .def_property_readonly("bytes_refused", [](const PyHostTier& t) { return t.tier().bytes_refused(); })
      .def_property_readonly("pin_refusal", [](const PyHostTier& t) { return t.tier().pin_refusal(); });
}

}  // namespace shardcore::bind

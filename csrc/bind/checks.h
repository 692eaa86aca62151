// What every binding shares: reading Python sequences of tensors, argument checks, torch's threads as an Executor.
//
// What Python checks, or makes itself, is not checked again: only tensors that users can change between two steps. Errors read
// "op: argument[index] has X; expected Y (what to do)" and are raised before anything is written.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/executor.h"

namespace shardcore::bind {

namespace py = pybind11;

// The argument that a message names: "op: name[index]", or "op: name" without index.
struct Where {
  const char* op;
  const char* name;
  int64_t index = -1;
};
std::ostream& operator<<(std::ostream& out, const Where& where);

template <typename... Parts>
[[noreturn]] void value_error(const Where& where, const Parts&... parts) {
  std::ostringstream message;
  message << where << " has ";
  (message << ... << parts);
  throw py::value_error(message.str());
}

template <typename... Parts>
[[noreturn]] void type_error(const Where& where, const Parts&... parts) {
  std::ostringstream message;
  message << where << " has ";
  (message << ... << parts);
  throw py::type_error(message.str());
}

// Tensors that a tuple of their own keeps, with the GIL held or not; destroyed with the GIL held. One more
// reference per tensor, as in a vector of them, would take as much time as the checks of a long list.
class TensorList {
 public:
  TensorList() = default;
  explicit TensorList(py::tuple items) : items_(std::move(items)), size_(items_.size()) {}

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Undefined where the item is None.
  const at::Tensor& operator[](size_t i) const {
    PyObject* const item = PyTuple_GET_ITEM(items_.ptr(), static_cast<Py_ssize_t>(i));
    return item == Py_None ? undefined_ : THPVariable_Unpack(item);
  }
  PyObject* items() const { return items_.ptr(); }

 private:
  static const at::Tensor undefined_;
  py::tuple items_;
  size_t size_ = 0;
};

// The tensors of a Python sequence; undefined tensors where the item is None and none_allowed.
TensorList tensors_of(const char* op, const char* name, const py::handle& sequence, bool none_allowed = false);
// pybind11's own error names no argument.
double number_of(const Where& where, const py::handle& object);

void check_count(const char* op, const char* name, size_t count, const char* of, size_t expected);
// Refuses a tensor whose storage does not hold all its elements: it was resized, and has to be filled before the next use.
void check_memory(const Where& where, const at::Tensor& tensor);
// Dense, contiguous, on `device`, and its bytes in memory are its values: see checks.cpp.
void check_layout(const Where& where, const at::Tensor& tensor, at::Device device);
// The same for what goes through memory element by element: no gaps or overlaps, dimensions in any order (channels_last).
void check_dense(const Where& where, const at::Tensor& tensor, at::Device device);
bool is_dense(const at::Tensor& tensor);
// Whether two dense tensors of one shape have each element at the same place of their memory.
bool same_order(const at::Tensor& a, const at::Tensor& b);
// Whether its values are the bytes of its own memory.
bool is_plain(const at::Tensor& tensor);
// cpu or cuda (if this build has it).
void check_device_supported(const Where& where, at::Device device);
void check_numel(const Where& where, const at::Tensor& tensor, int64_t numel, const char* of);
void check_f32(const Where& where, const at::Tensor& tensor);
DType float_dtype(const Where& where, const at::Tensor& tensor);

// `where` shares bytes with `other`, and the call writes one of them.
[[noreturn]] void refuse_shared(const Where& where, const Where& other);

// Counts an in-place write in the version that autograd checks.
void bump_version(const at::Tensor& tensor);

// at::parallel_for, where torch.set_num_threads holds, unless the calling thread has threads of its own.
Executor& torch_executor();

// Makes kernels that the calling thread runs use `count` threads of its own, itself included, until it ends.
void use_threads(int count);

void bind_adam(py::module_& module);
void bind_elements(py::module_& module);
void bind_ops(py::module_& module);
void bind_moments(py::module_& module);
void bind_offload(py::module_& module);
void bind_file_engine(py::module_& module);
void bind_storage(py::module_& module);

}  // namespace shardcore::bind

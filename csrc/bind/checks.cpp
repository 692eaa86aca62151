#include "bind/checks.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "core/cpu_isa.h"
#include "core/thread_pool.h"

#ifndef INTRA_OP_PARALLEL
#error "ATen/Parallel.h would run serially: compile with -fopenmp (csrc/flags.txt)"
#endif

namespace shardcore::bind {

std::ostream& operator<<(std::ostream& out, const Where& where) {
  out << where.op << ": " << where.name;
  if (where.index >= 0) out << "[" << where.index << "]";
  return out;
}

namespace {

[[noreturn]] void refuse_type(const Where& where, const py::handle& object, const char* expected) {
  type_error(where, "type ", Py_TYPE(object.ptr())->tp_name, "; expected ", expected);
}

}  // namespace

const at::Tensor TensorList::undefined_;

TensorList tensors_of(const char* op, const char* name, const py::handle& sequence, bool none_allowed) {
  // A tensor is a sequence too, of tensors even.
  if (!PySequence_Check(sequence.ptr()) || THPVariable_Check(sequence.ptr()))
    refuse_type({op, name}, sequence, "a list of tensors");
  py::tuple kept = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!kept) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kept.ptr()); ++i) {
    PyObject* const item = PyTuple_GET_ITEM(kept.ptr(), i);
    if (!(THPVariable_Check(item) || (none_allowed && item == Py_None)))
      type_error({op, name, i}, "type ", Py_TYPE(item)->tp_name, "; expected a tensor", none_allowed ? " or None" : "");
  }
  return TensorList(std::move(kept));
}

double number_of(const Where& where, const py::handle& object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (too_large) value_error(where, "an int too large for a double; expected a number");
    refuse_type(where, object, "a number");
  }
  return value;
}

void check_count(const char* op, const char* name, size_t count, const char* of, size_t expected) {
  if (count != expected) value_error({op, name}, count, " items; expected ", expected, " (one for each of ", of, ")");
}

void check_device_supported(const Where& where, at::Device device) {
  if (device.is_cpu()) {
    cpu_isa();  // reads SHARDCORE_CPU_ISA: an unknown name is refused here, before anything is marked as written
    return;
  }
  if (!device.is_cuda()) value_error(where, "device ", device.str(), "; expected cpu or cuda");
#ifndef SHARDCORE_WITH_CUDA
  value_error(where, "device ", device.str(),
              "; expected cpu (this build has no CUDA: install nvcc and a CUDA build of torch, then build again)");
#endif
}

namespace {

// The values of such tensors are elsewhere (in another tensor, in a program, nowhere), or are not what the bytes say.
constexpr c10::DispatchKeySet kNotPlain({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});

[[noreturn]] void refuse_not_plain(const Where& where, const at::Tensor& tensor) {
  if (tensor.is_conj()) value_error(where, "torch's conjugate bit set; expected plain values (call resolve_conj())");
  if (tensor.is_neg()) value_error(where, "torch's negative bit set; expected plain values (call resolve_neg())");
  value_error(where,
              "no memory of its own (it wraps another tensor, or stands for one); expected a plain tensor (for a DTensor: "
              "call to_local())");
}

}  // namespace

void check_memory(const Where& where, const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) value_error(where, "no memory of its own; expected a plain tensor");
  if (impl->numel() == 0) return;
  const c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
  int64_t end = impl->storage_offset() + 1;
  for (int64_t i = 0; i < impl->dim(); ++i) end += (impl->size(i) - 1) * impl->stride(i);
  if (static_cast<size_t>(end) * impl->itemsize() > storage->nbytes() || storage->data() == nullptr) {
    value_error(where, "a storage of ", storage->data() == nullptr ? 0 : storage->nbytes(), " bytes; expected ",
                static_cast<size_t>(end) * impl->itemsize(), " (its memory was released: restore it first)");
  }
}

bool is_plain(const at::Tensor& tensor) { return !tensor.key_set().has_any(kNotPlain); }

namespace {

void check_place(const Where& where, const at::Tensor& tensor, at::Device device) {
  if (tensor.key_set().has_any(kNotPlain)) refuse_not_plain(where, tensor);
  if (tensor.layout() != at::kStrided)
    value_error(where, "layout ", tensor.layout(), "; expected a dense tensor (call to_dense())");
  if (tensor.device() != device) {
    value_error(where, "device ", tensor.device().str(), "; expected ", device.str(), " (all tensors of a call on one device)");
  }
}

}  // namespace

void check_layout(const Where& where, const at::Tensor& tensor, at::Device device) {
  check_place(where, tensor, device);
  if (!tensor.is_contiguous()) {
    value_error(where, "shape ", tensor.sizes(), " with strides ", tensor.strides(),
                "; expected a contiguous tensor (call contiguous())");
  }
  check_memory(where, tensor);
}

void check_dense(const Where& where, const at::Tensor& tensor, at::Device device) {
  check_place(where, tensor, device);
  if (!is_dense(tensor)) {
    value_error(where, "shape ", tensor.sizes(), " with strides ", tensor.strides(),
                "; expected memory without gaps or overlaps (call contiguous())");
  }
  check_memory(where, tensor);
}

bool is_dense(const at::Tensor& tensor) { return tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(); }

bool same_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() || b.is_contiguous()) return a.is_contiguous() == b.is_contiguous();
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;  // torch gives a dimension of one element any stride
  }
  return true;
}

void check_numel(const Where& where, const at::Tensor& tensor, int64_t numel, const char* of) {
  if (tensor.numel() != numel) value_error(where, tensor.numel(), " elements; expected ", numel, " (as ", of, ")");
}

void check_f32(const Where& where, const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kFloat) type_error(where, "dtype ", tensor.scalar_type(), "; expected Float");
}

DType float_dtype(const Where& where, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      type_error(where, "dtype ", tensor.scalar_type(), "; expected Float, BFloat16 or Half");
  }
}

void refuse_shared(const Where& where, const Where& other) {
  std::ostringstream whose;
  whose << other.name;
  if (other.index >= 0) whose << "[" << other.index << "]";
  value_error(where, "memory that ", whose.str(), " has too; expected memory of its own (this call writes there)");
}

void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

namespace {

// One thread's share of a parallel loop, in parts of part_size. Threads that have finished their own share take parts that are
// left, so that a thread whose core is busy delays no other; otherwise a core works on the same memory in each step.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;

  void work(int64_t part_size, const Executor::RangeFn& fn) {
    for (int64_t first; (first = next.fetch_add(part_size, std::memory_order_relaxed)) < end;) {
      fn(first, std::min(end, first + part_size));
    }
  }
};
constexpr int64_t kPartsPerShare = 16;

// The threads of at::parallel_for (libgomp's) do not exist in a forked child, which would wait for them for ever. So only the
// process that started them uses them; a child of it works alone, to the same bits.
class TorchExecutor final : public Executor {
 public:
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) override {
    if (begin >= end) return;
    const int64_t count = end - begin,
                  num = std::min<int64_t>(at::get_num_threads(), (count - 1) / std::max<int64_t>(1, grain) + 1);
    if (num == 1 || !owns_threads()) {
      fn(begin, end);
      return;
    }
    std::vector<Share> shares(static_cast<size_t>(num));
    for (int64_t i = 0; i < num; ++i) {
      Share& share = shares[static_cast<size_t>(i)];
      share.next = begin + count / num * i + std::min(i, count % num);
      share.end = begin + count / num * (i + 1) + std::min(i + 1, count % num);
    }
    const int64_t part_size = std::max(grain, count / (num * kPartsPerShare));
    at::parallel_for(0, num, 1, [&](int64_t first, int64_t last) {
      for (int64_t own = first; own < last; ++own) {
        for (int64_t i = 0; i < num; ++i) shares[static_cast<size_t>((own + i) % num)].work(part_size, fn);
      }
    });
  }

 private:
  bool owns_threads() {
    const pid_t self = getpid();
    pid_t owner = 0;
    return owner_.compare_exchange_strong(owner, self) || owner == self;
  }

  std::atomic<pid_t> owner_{0};  // the process that called at::parallel_for first; 0: none yet, then a child may
};

thread_local int num_own_threads = 0;  // 0: torch's
thread_local std::unique_ptr<ThreadPool> own_threads;

// The calling thread's own; they start with its first kernel: a thread that only waits for a step has none.
class OwnExecutor final : public Executor {
 public:
  void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) override {
    if (own_threads == nullptr) own_threads = std::make_unique<ThreadPool>(num_own_threads);
    own_threads->parallel_for(begin, end, grain, fn);
  }
};

}  // namespace

void use_threads(int count) {
  own_threads.reset();
  num_own_threads = count;
}

Executor& torch_executor() {
  static TorchExecutor of_torch;
  static OwnExecutor own;
  if (num_own_threads == 0) return of_torch;
  return own;
}

}  // namespace shardcore::bind

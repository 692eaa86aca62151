// Files: FileEngine, FileWriter, FileReader; checksums; names of files.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include <memory>

#include "bind/checks.h"
#include "io/crc32c.h"
#include "io/file_io.h"

namespace shardcore::bind {
namespace {

// pybind11's classes are hidden symbols, as are these.
struct PyFileEngine : FileEngine {
  using FileEngine::FileEngine;
};
struct PyFileWriter : FileWriter {
  using FileWriter::FileWriter;
};
struct PyFileReader : FileReader {
  using FileReader::FileReader;
};
struct PyBlockFile : BlockFile {
  using BlockFile::BlockFile;
};

std::string path_of(const py::handle& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

// Python's OSError picks its subclass (FileNotFoundError, PermissionError) by errno when it is called.
void raise_os_error(const IoError& error) {
  const auto file = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(error.path.data(), static_cast<Py_ssize_t>(error.path.size())));
  const auto type = py::reinterpret_borrow<py::object>(PyExc_OSError);
  const py::object made =
      error.path.empty() ? type(error.error_number, error.what()) : type(error.error_number, error.what(), file);
  PyErr_SetObject(py::type::handle_of(made).ptr(), made.ptr());
}

const void* dense_bytes(const char* op, const char* name, const at::Tensor& tensor) {
  check_layout({op, name}, tensor, at::kCPU);
  return tensor.const_data_ptr();
}

uint32_t append(PyFileWriter& writer, const at::Tensor& tensor) {
  const void* const data = dense_bytes("FileWriter.append", "tensor", tensor);
  const py::gil_scoped_release no_gil;
  return writer.append(data, static_cast<int64_t>(tensor.nbytes()));
}

// A function, since pybind11 of torch 2.11 takes a noexcept method of a base for one of the base, which Python does not know.
template <class File>
void close(File& file) {
  file.close();
}

uint32_t crc32c_of(const at::Tensor& tensor) {
  const void* const data = dense_bytes("crc32c", "tensor", tensor);
  const py::gil_scoped_release no_gil;
  return crc32c(data, static_cast<int64_t>(tensor.nbytes()));
}

// A read of nothing, too.
class PyFileRead {
 public:
  PyFileRead(FileReader& reader, int64_t offset, int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) {
      reader.check(offset, bytes);
    } else {
      read_ = reader.start(offset, bytes);
    }
  }

  at::Tensor wait() {
    const auto options = at::TensorOptions().dtype(at::kByte);
    if (bytes_ == 0) return at::empty({0}, options);
    FileRead::Result result;
    {
      const py::gil_scoped_release no_gil;
      result = read_->wait();
    }
    const auto release = [pool = result.pool, buffer = result.buffer](void*) { pool->release(buffer); };
    return at::from_blob(result.data, {bytes_}, release, options);
  }

 private:
  const int64_t bytes_;
  std::unique_ptr<FileRead> read_;  // destroyed with the GIL held, which no transfer needs
};

// Keeps the memory, which only the transfer uses until it is over.
class PyFileTransfer {
 public:
  PyFileTransfer(BlockFile& file, FileOp op, at::Tensor memory, int64_t offset) : memory_(std::move(memory)) {
    check_layout({"BlockFile", "memory"}, memory_, at::kCPU);
    if (op == FileOp::read) bump_version(memory_);
    void* const data = op == FileOp::read ? memory_.mutable_data_ptr() : const_cast<void*>(memory_.const_data_ptr());
    const py::gil_scoped_release no_gil;
    transfer_ = file.start(op, data, offset, static_cast<int64_t>(memory_.nbytes()));
  }

  void wait() { transfer_->wait(); }

 private:
  const at::Tensor memory_;
  std::unique_ptr<FileTransfer> transfer_;
};

}  // namespace

void bind_file_engine(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const IoError& error) {
      raise_os_error(error);
    }
  });

  py::class_<PyFileEngine, std::shared_ptr<PyFileEngine>>(module, "FileEngine")
      .def(py::init([](const std::string& backend, int depth, const std::string& faults) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<PyFileEngine>(backend, depth, faults);
           }),
           py::arg("backend") = "auto", py::arg("depth") = 16, py::arg("faults") = "")
      .def_property_readonly("backend", &PyFileEngine::backend)
      .def_property_readonly("note", &PyFileEngine::note);

  py::class_<PyFileWriter, std::shared_ptr<PyFileWriter>>(module, "FileWriter")
      .def(py::init([](std::shared_ptr<PyFileEngine> engine, const py::object& path, int64_t size_bytes, bool direct,
                       bool overwrite) {
             const std::string name = path_of(path);
             const py::gil_scoped_release no_gil;
             return std::make_shared<PyFileWriter>(std::move(engine), name, size_bytes, direct, overwrite);
           }),
           py::arg("engine").none(false), py::arg("path"), py::arg("size_bytes"), py::arg("direct") = true,
           py::arg("overwrite") = false)
      .def("append", &append, py::arg("tensor"))
      .def("finish", &PyFileWriter::finish, py::call_guard<py::gil_scoped_release>())
      .def("close", &close<PyFileWriter>, py::call_guard<py::gil_scoped_release>());

  py::class_<PyFileRead, std::shared_ptr<PyFileRead>>(module, "FileRead").def("wait", &PyFileRead::wait);

  py::class_<PyFileReader, std::shared_ptr<PyFileReader>>(module, "FileReader")
      .def(py::init([](std::shared_ptr<PyFileEngine> engine, const py::object& path, bool direct) {
             const std::string name = path_of(path);
             const py::gil_scoped_release no_gil;
             return std::make_shared<PyFileReader>(std::move(engine), name, direct);
           }),
           py::arg("engine").none(false), py::arg("path"), py::arg("direct") = true)
      .def_property_readonly("size_bytes", &PyFileReader::size_bytes)
      .def(
          "start",
          [](PyFileReader& reader, int64_t offset, int64_t nbytes) {
            const py::gil_scoped_release no_gil;
            return std::make_shared<PyFileRead>(reader, offset, nbytes);
          },
          py::arg("offset"), py::arg("nbytes"))
      .def("close", &close<PyFileReader>, py::call_guard<py::gil_scoped_release>());

  py::class_<PyFileTransfer, std::shared_ptr<PyFileTransfer>>(module, "FileTransfer")
      .def("wait", &PyFileTransfer::wait, py::call_guard<py::gil_scoped_release>());

  py::class_<PyBlockFile, std::shared_ptr<PyBlockFile>>(module, "BlockFile")
      .def(py::init([](std::shared_ptr<PyFileEngine> engine, const py::object& path, int64_t size_bytes, bool direct) {
             const std::string name = path_of(path);
             const py::gil_scoped_release no_gil;
             return std::make_shared<PyBlockFile>(std::move(engine), name, size_bytes, direct);
           }),
           py::arg("engine").none(false), py::arg("path"), py::arg("size_bytes"), py::arg("direct") = true)
      .def_property_readonly("block_bytes", &PyBlockFile::block_bytes)
      .def(
          "read",
          [](PyBlockFile& file, const at::Tensor& memory, int64_t offset) {
            return std::make_shared<PyFileTransfer>(file, FileOp::read, memory, offset);
          },
          py::arg("memory"), py::arg("offset"))
      .def(
          "write",
          [](PyBlockFile& file, const at::Tensor& memory, int64_t offset) {
            return std::make_shared<PyFileTransfer>(file, FileOp::write, memory, offset);
          },
          py::arg("memory"), py::arg("offset"))
      .def("sync", &PyBlockFile::sync, py::call_guard<py::gil_scoped_release>());

  module.def("crc32c", &crc32c_of, py::arg("tensor"));
  module.def(
      "exchange_paths",
      [](const py::object& a, const py::object& b) {
        const std::string first = path_of(a), second = path_of(b);
        const py::gil_scoped_release no_gil;
        return exchange_paths(first, second);
      },
      py::arg("a"), py::arg("b"));
}

}  // namespace shardcore::bind

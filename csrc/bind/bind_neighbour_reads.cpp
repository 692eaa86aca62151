// NeighbourReads and Ticket.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>

#include "bind/checks.h"
#include "copy/neighbour_reads.h"

namespace shardcore::bind {

// A piece on its way.
class __attribute__((visibility("hidden"))) PyTicket {
 public:
  explicit PyTicket(std::shared_ptr<Ticket> ticket) : ticket_(std::move(ticket)) {}

  void wait() {
    {
      const py::gil_scoped_release no_gil;
      ticket_->wait();
    }
    ticket_->let_go();
  }

 private:
  std::shared_ptr<Ticket> ticket_;
};

class __attribute__((visibility("hidden"))) PyNeighbourReads {
 public:
  PyNeighbourReads(const py::handle& count_object, const py::handle& own_object, const py::handle& seconds_object) {
    const char* const op = "NeighbourReads";
    count_ = int_of({op, "count"}, count_object);
    own_ = int_of({op, "own"}, own_object);
    const double seconds = number_of({op, "timeout_seconds"}, seconds_object);
    if (count_ < 1 || count_ > (1 << 20)) value_error({op, "count"}, count_, "; expected 1 to ", 1 << 20);
    check_number({op, "own"}, own_);
    if (!(seconds > 0)) value_error({op, "timeout_seconds"}, seconds, "; expected a number above 0");
    reads_ = std::make_unique<NeighbourReads>(static_cast<int>(count_), static_cast<int>(own_),
                                              static_cast<int64_t>(1e9 * std::min(seconds, 1e9)));
  }

  py::tuple address() const {
    const NeighbourAddress address = reads_->address();
    return py::make_tuple(address.pid, address.file, address.board, address.mark[0], address.mark[1]);
  }

  std::string connect(const py::handle& number_object, const std::array<int64_t, 5>& numbers) {
    const int64_t number = int_of({"NeighbourReads.connect", "number"}, number_object);
    check_number({"NeighbourReads.connect", "number"}, number);
    std::string why_not =
        reads_->connect(static_cast<int>(number), {numbers[0], numbers[1], numbers[2], {numbers[3], numbers[4]}});
    if (why_not.empty()) connected_.push_back(number);
    return why_not;
  }

  PyTicket send(const py::handle& to, const py::handle& tag, const py::handle& data) {
    const Piece piece = piece_of("NeighbourReads.send", "to", to, tag, data);
    return PyTicket(reads_->send(piece.other, piece.tag, piece.data.const_data_ptr(), piece.size_bytes, piece.owner));
  }

  PyTicket receive(const py::handle& source, const py::handle& tag, const py::handle& data) {
    const Piece piece = piece_of("NeighbourReads.receive", "source", source, tag, data);
    mark_written(piece.data);
    return PyTicket(reads_->receive(piece.other, piece.tag, piece.data.data_ptr(), piece.size_bytes, piece.owner));
  }

 private:
  struct Piece {
    int other;
    int64_t tag;
    at::Tensor data;
    int64_t size_bytes;
    std::shared_ptr<void> owner;
  };

  void check_number(const Where& where, int64_t number) const {
    if (number < 0 || number >= count_) value_error(where, number, "; expected 0 to ", count_ - 1);
  }

  Piece piece_of(const char* op, const char* name, const py::handle& other_object, const py::handle& tag,
                 const py::handle& data_object) const {
    const int64_t other = int_of({op, name}, other_object);
    if (std::find(connected_.begin(), connected_.end(), other) == connected_.end()) {
      value_error({op, name}, other, "; expected the number of a process that connect() found");
    }
    const at::Tensor data = tensor_of(op, "data", data_object);
    check_layout({op, "data"}, data, at::Device(at::kCPU));
    return {static_cast<int>(other), int_of({op, "tag"}, tag), data, static_cast<int64_t>(data.nbytes()),
            std::make_shared<at::Tensor>(data)};
  }

  int64_t count_ = 0, own_ = 0;
  std::vector<int64_t> connected_;
  std::unique_ptr<NeighbourReads> reads_;
};

void bind_neighbour_reads(py::module_& module) {
  py::class_<PyTicket>(module, "Ticket").def("wait", &PyTicket::wait);
  py::class_<PyNeighbourReads>(module, "NeighbourReads")
      .def(py::init<const py::handle&, const py::handle&, const py::handle&>(), py::arg("count"), py::arg("own"),
           py::arg("timeout_seconds"))
      .def("address", &PyNeighbourReads::address)
      .def("connect", &PyNeighbourReads::connect, py::arg("number"), py::arg("address"))
      .def("send", &PyNeighbourReads::send, py::arg("to"), py::arg("tag"), py::arg("data"))
      .def("receive", &PyNeighbourReads::receive, py::arg("source"), py::arg("tag"), py::arg("data"));
}

}  // namespace shardcore::bind

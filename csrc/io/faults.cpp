#include "io/faults.h"

#include <cerrno>
#include <map>
#include <sstream>
#include <stdexcept>

namespace shardcore {
namespace {

const std::map<std::string, FileOp> kOps = {
    {"read", FileOp::read}, {"write", FileOp::write}, {"reserve", FileOp::reserve}, {"sync", FileOp::sync}};
const std::map<std::string, int> kErrors = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EINTR", EINTR},
                                            {"EAGAIN", EAGAIN}, {"EINVAL", EINVAL}, {"ENODEV", ENODEV}, {"EROFS", EROFS}};

[[noreturn]] void refuse(const std::string& rule) {
  throw std::invalid_argument("FileEngine: faults has \"" + rule +
                              "\"; expected rules such as write:EIO@1048576, reserve:ENOSPC, sync:EIO, short, stuck, delay:5, "
                              "flip:read@7 (csrc/io/faults.h)");
}

int64_t number_of(const std::string& rule, const std::string& text) {
  if (text.empty() || text.size() > 18 || text.find_first_not_of("0123456789") != std::string::npos) refuse(rule);
  return std::stoll(text);
}

template <typename Value>
Value look_up(const std::string& rule, const std::map<std::string, Value>& known, const std::string& name) {
  const auto found = known.find(name);
  if (found == known.end()) refuse(rule);
  return found->second;
}

}  // namespace

Faults::Faults(const std::string& rules) {
  std::istringstream list(rules);
  for (std::string rule; std::getline(list, rule, ',');) {
    const std::string what = rule.substr(0, rule.find(':'));
    std::string rest = what.size() < rule.size() ? rule.substr(what.size() + 1) : "";
    if (rule == "short") {
      short_ = true;
    } else if (rule == "stuck") {
      stuck_ = true;
    } else if (what == "delay") {
      const int64_t given = number_of(rule, rest);
      if (given > 60000) refuse(rule);
      delay_ms_ = static_cast<int>(given);
    } else {
      const size_t at = rest.find('@');
      const int64_t offset = at == std::string::npos ? -1 : number_of(rule, rest.substr(at + 1));
      rest = rest.substr(0, at);
      if (what == "flip") {
        const FileOp op = look_up(rule, kOps, rest);
        if (offset < 0 || (op != FileOp::read && op != FileOp::write)) refuse(rule);
        rules_.push_back({op, 0, offset});
      } else {
        rules_.push_back({look_up(rule, kOps, what), look_up(rule, kErrors, rest), offset});
      }
    }
  }
}

int Faults::find_error(FileOp op, int64_t offset, int64_t size_bytes, bool first_attempt, bool direct) const {
  for (const Rule& rule : rules_) {
    if (rule.op != op || rule.error == 0) continue;
    if (rule.offset >= 0 && (rule.offset < offset || rule.offset - offset >= size_bytes)) continue;
    if ((rule.error == EINTR || rule.error == EAGAIN) && !first_attempt) continue;
    if (rule.error == EINVAL && !direct) continue;
    return rule.error;
  }
  return 0;
}

void Faults::flip(FileOp op, char* data, int64_t offset, int64_t size_bytes) const {
  for (const Rule& rule : rules_) {
    if (rule.op != op || rule.error != 0 || rule.offset < offset || rule.offset - offset >= size_bytes) continue;
    data[rule.offset - offset] = static_cast<char>(data[rule.offset - offset] ^ 1);
  }
}

}  // namespace shardcore

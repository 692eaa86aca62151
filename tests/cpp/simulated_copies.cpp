// simulated_copies.h for Python's tests, which compile this file (tests/support/copies.py).
#include "cpp/simulated_copies.h"

extern "C" shardcore::CopyBackend* simulated_backend(double bytes_per_second, int64_t failing_copy, bool late,
                                                     int64_t pinnable_bytes) {
  return shardcore::testing::make_simulated_backend({bytes_per_second, failing_copy, late, pinnable_bytes}).release();
}

// What this machine can do at best: the floors that CPU results stand beside.
#pragma once

#include <cstdint>

#include "penstock/core/thread_pool.h"

namespace penstock::bench {

// Bytes a second that all threads read together out of a buffer of `bytes` that was read just
// before: cache rate while it fits, memory rate when not. Best of several passes.
double read_rate(ThreadPool& pool, std::int64_t bytes);

// f32 FLOP a second of all threads together, multiply-adds in registers only (two FLOP each). Best
// of several passes.
double fma_rate(ThreadPool& pool);

}  // namespace penstock::bench

// A CUDA runtime and driver without a GPU, for tests of the host side of the fabric: memory is the
// host's, a stream is a queue that one thread works off, slowly enough that work is in flight. It
// counts what lives and can refuse the n-th creation.
#pragma once

#include <chrono>
#include <map>
#include <string>

namespace penstock::fake_cuda {

// What exists now: "stream", "event", "device memory", "pinned memory", "graph", "graph exec",
// "allocation", "mapping", "address range".
std::map<std::string, int> alive();

// The n-th creation from now on is refused (out of memory), once; 0: none.
void refuse_creation(int n);
// Creations since the last refuse_creation().
int creations();

// How long each copy, write and kernel takes.
void set_pace(std::chrono::microseconds each);

// From now on allocations of host memory on the proxy's thread throw std::bad_alloc.
void starve_proxy(bool on);

}  // namespace penstock::fake_cuda

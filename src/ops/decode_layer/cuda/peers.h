// Ranks of one process on several GPUs, or sharing one.
#pragma once

#include <span>

namespace penstock::decode {

// Lets kernels on each of these GPUs use the memory of the others. Throws Unsupported naming a pair
// that cannot reach each other.
void enable_peers(std::span<const int> devices);

// Multiprocessors for each rank of `device` if all of `devices` (one entry a rank) run at once; 0
// (all of them) for a rank that has the GPU to itself. Kernels of ranks wait for each other, so all
// their CTAs must be resident.
int share_of_device(int device, std::span<const int> devices);

}  // namespace penstock::decode

// One macro for functions that hosts and kernels share. constexpr alone is not enough: nvcc calls a
// constexpr host function from device code only under --expt-relaxed-constexpr, a flag that users
// of these headers need not set.
#pragma once

#if defined(__CUDACC__)
#  define PENSTOCK_HOST_DEVICE __host__ __device__
#else
#  define PENSTOCK_HOST_DEVICE
#endif

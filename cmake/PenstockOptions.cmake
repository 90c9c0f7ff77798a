# Options, warnings, sanitizers and the CUDA switch, in one place.
set(PENSTOCK_CUDA "AUTO" CACHE STRING "Build the CUDA back end: AUTO (if nvcc is found), ON (fail without it), OFF")
set_property(CACHE PENSTOCK_CUDA PROPERTY STRINGS AUTO ON OFF)
option(PENSTOCK_BUILD_CLI "Build the penstock command" ON)
option(PENSTOCK_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(PENSTOCK_BUILD_BENCH "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(PENSTOCK_BUILD_FUZZERS "Build the libFuzzer targets (clang only)" OFF)
set(PENSTOCK_SANITIZE "" CACHE STRING "Sanitizers for host code, e.g. address,undefined or thread")
option(PENSTOCK_TIMELINE "Compile the in-kernel timeline in" OFF)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(penstock_warnings INTERFACE)
target_compile_options(
  penstock_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Werror>)

if(PENSTOCK_SANITIZE)
  set(_san -fsanitize=${PENSTOCK_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
      # Instrumented code draws false alarms from GCC's flow-based warnings.
      -Wno-stringop-overflow -Wno-array-bounds -Wno-maybe-uninitialized)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${_san}>")
  add_link_options(${_san})
endif()

# A hwy target of our own: Debian's package exports hwy through pkg-config and CMake alike, consumers get plain -lhwy.
add_library(penstock_hwy INTERFACE)
target_link_libraries(penstock_hwy INTERFACE hwy)

set(PENSTOCK_WITH_CUDA OFF)
if(NOT PENSTOCK_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # 90a, real code only: the -arch=sm_90a shorthand may add a plain sm_90 pass that rejects wgmma.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    # CMake 3.25.1 has no flag on record for CUDA C++20, and targets inherit cxx_std_20 from penstock_device.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "")
    endif()
    find_package(CUDAToolkit 12.8 REQUIRED)
    set(PENSTOCK_WITH_CUDA ON)
    # CMake 3.25.1 does not know CUDA standard 20, so the flag goes to nvcc directly. ptxas -v feeds the resource table.
    add_library(penstock_cuda_options INTERFACE)
    target_compile_options(
      penstock_cuda_options
      INTERFACE
        "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr;-lineinfo;-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter>"
    )
  elseif(PENSTOCK_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PENSTOCK_CUDA=ON needs nvcc: put it on PATH or set CMAKE_CUDA_COMPILER")
  endif()
endif()
message(STATUS "Penstock: CUDA back end ${PENSTOCK_WITH_CUDA}, build type ${CMAKE_BUILD_TYPE}")

# penstock_add_test(name SOURCES ... [LIBS ...] [LABELS ...] [TIMEOUT s]): one GoogleTest binary, registered with ctest.
# RapidCheck is linked everywhere (rapidcheck::gtest). The model folder reaches tests as PENSTOCK_TEST_MODELS.
include(GoogleTest)

file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/test_paths.h" CONTENT
     "#define PENSTOCK_TEST_MODELS \"${PROJECT_SOURCE_DIR}/models\"\n#define PENSTOCK_TEST_BINARY_DIR \"${PROJECT_BINARY_DIR}\"\n")

function(penstock_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(
    ${name} PRIVATE penstock_core penstock_warnings GTest::gtest_main ${arg_LIBS} rapidcheck
                    fmt::fmt-header-only nlohmann_json::nlohmann_json)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/tests")
  # By a header, not by -D: a path on the command line would keep ccache from sharing objects between folders.
  target_compile_options(${name} PRIVATE "SHELL:-include ${PROJECT_BINARY_DIR}/test_paths.h")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT})
  if("threads" IN_LIST arg_LABELS)
    set_property(GLOBAL APPEND PROPERTY PENSTOCK_THREAD_TESTS ${name})
  endif()
  if(arg_LABELS)
    # gtest_discover_tests flattens a list of labels and loses all but the first: set them when ctest reads the tests.
    set(_file "${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake")
    file(CONFIGURE OUTPUT "${_file}" @ONLY CONTENT
         "foreach(_test IN LISTS ${name}_TESTS)\n  set_tests_properties(\"\${_test}\" PROPERTIES LABELS \"${arg_LABELS}\")\nendforeach()\n")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${_file}")
  endif()
endfunction()

# penstock_add_gpu_test(name SOURCES ... [LIBS ...]): runs on a machine with a GPU; built everywhere nvcc is. Linked
# statically but for glibc, so that the binary can be carried to a machine without the project's libraries.
function(penstock_add_gpu_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE penstock_cuda penstock_core penstock_warnings penstock_cuda_options
                                        GTest::gtest_main ${arg_LIBS} CUDA::cudart_static)
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--as-needed)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/tests")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/gpu_tests")
  set_property(GLOBAL APPEND PROPERTY PENSTOCK_GPU_TESTS ${name})
endfunction()

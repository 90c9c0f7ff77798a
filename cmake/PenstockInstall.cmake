# Install rules and the exported package: find_package(penstock) gives penstock::core, ::device, ::cuda and ::cli.
set(_targets penstock_device penstock_core)
if(PENSTOCK_WITH_CUDA)
  list(APPEND _targets penstock_cuda)
endif()
if(PENSTOCK_BUILD_CLI)
  list(APPEND _targets penstock_cli)
endif()
install(TARGETS penstock_warnings penstock_hwy EXPORT penstockTargets)
if(PENSTOCK_WITH_CUDA)
  install(TARGETS penstock_cuda_options EXPORT penstockTargets)
endif()
install(TARGETS ${_targets} EXPORT penstockTargets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/penstock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT penstockTargets NAMESPACE penstock:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
configure_package_config_file(
  cmake/penstockConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/penstockConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/penstockConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/penstockConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/penstockConfigVersion.cmake"
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)

# The version of the package, for find_package(tsfuser 0.2).
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../version.py" _tsfuser_line REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" PACKAGE_VERSION "${_tsfuser_line}")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  string(COMPARE EQUAL "${PACKAGE_FIND_VERSION}" "${PACKAGE_VERSION}" PACKAGE_VERSION_EXACT)
endif()

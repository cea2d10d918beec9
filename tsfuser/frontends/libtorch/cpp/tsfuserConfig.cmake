# find_package(tsfuser) gives the target tsfuser::tsfuser: tsfuser.h with its source, and torch, as
# `python -m tsfuser config` says. TSFUSER_PYTHON is the interpreter of the environment that has both; by
# default the first python3 of the PATH.
if(TARGET tsfuser::tsfuser)
  return()
endif()
find_program(TSFUSER_PYTHON NAMES python3 python DOC "the interpreter that has torch and tsfuser")

foreach(_tsfuser_kind cflags libs)
  execute_process(
    COMMAND "${TSFUSER_PYTHON}" -m tsfuser config --${_tsfuser_kind}
    WORKING_DIRECTORY "${CMAKE_CURRENT_LIST_DIR}"
    OUTPUT_VARIABLE _tsfuser_words
    ERROR_VARIABLE _tsfuser_error
    RESULT_VARIABLE _tsfuser_status
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _tsfuser_status EQUAL 0)
    set(tsfuser_FOUND FALSE)
    set(tsfuser_NOT_FOUND_MESSAGE
        "\"${TSFUSER_PYTHON} -m tsfuser config\" fails; set TSFUSER_PYTHON\n${_tsfuser_error}")
    return()
  endif()
  string(REPLACE " " ";" _tsfuser_${_tsfuser_kind} "${_tsfuser_words}")
endforeach()

# A newer standard, which the program may ask for, is as good.
string(REGEX MATCH "-std=c\\+\\+[0-9]+" _tsfuser_standard "${_tsfuser_cflags}")
string(REGEX MATCH "[0-9]+" _tsfuser_standard "${_tsfuser_standard}")
list(FILTER _tsfuser_cflags EXCLUDE REGEX "^-std=")
list(FILTER _tsfuser_libs EXCLUDE REGEX "\\.cpp$")
add_library(tsfuser STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/tsfuser.cpp")
set_target_properties(tsfuser PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_features(tsfuser PUBLIC cxx_std_${_tsfuser_standard})
target_compile_options(tsfuser PUBLIC ${_tsfuser_cflags})
target_link_libraries(tsfuser PUBLIC ${_tsfuser_libs})
add_library(tsfuser::tsfuser ALIAS tsfuser)

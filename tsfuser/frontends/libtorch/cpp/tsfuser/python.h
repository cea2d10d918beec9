// Python's C functions, found in a library when the program runs, and calls of
// frontends/libtorch/embedded.py. Only tsfuser.cpp includes this file.
#pragma once

#include "../tsfuser.h"

#include <dlfcn.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace tsfuser {
namespace {

using Strings = std::vector<std::string>;

// Calls a function of embedded.py with strings, in this process or in another.
constexpr const char* call_embedded = R"(
import importlib.util, os, runpy, sys
try:
    spec = importlib.util.find_spec("tsfuser")
    if spec is None or not spec.origin:
        raise RuntimeError(sys.executable + " has no tsfuser: run `pip install --no-build-isolation .` of "
                           "that Python in tsfuser's folder")
    path = os.path.join(os.path.dirname(spec.origin), "frontends", "libtorch", "embedded.py")
    answer, failure = runpy.run_path(path)[function](*arguments), ""
except BaseException as error:
    answer, failure = "", str(error) or type(error).__name__
)";
// Python's C functions, found when the program runs. Objects are opaque.
struct Python {
  using Object = void;
  int (*IsInitialized)();
  Object* (*SaveThread)();
  void (*RestoreThread)(Object*);
  int (*Ensure)();
  void (*Release)(int);
  int (*HoldsLock)();
  Object* (*NewDict)();
  int (*SetItem)(Object*, const char*, Object*);
  Object* (*GetItem)(Object*, const char*);
  Object* (*NewList)(ssize_t);
  int (*Append)(Object*, Object*);
  Object* (*NewString)(const char*);
  const char* (*Text)(Object*);
  Object* (*Run)(const char*, int, Object*, Object*);
  void (*PrintError)();
  void (*DecRef)(Object*);

  // Of the library `handle`. Throws Error.
  explicit Python(void* handle) {
    find(handle, "Py_IsInitialized", IsInitialized);
    find(handle, "PyEval_SaveThread", SaveThread);
    find(handle, "PyEval_RestoreThread", RestoreThread);
    find(handle, "PyGILState_Ensure", Ensure);
    find(handle, "PyGILState_Release", Release);
    find(handle, "PyGILState_Check", HoldsLock);
    find(handle, "PyDict_New", NewDict);
    find(handle, "PyDict_SetItemString", SetItem);
    find(handle, "PyDict_GetItemString", GetItem);
    find(handle, "PyList_New", NewList);
    find(handle, "PyList_Append", Append);
    find(handle, "PyUnicode_DecodeFSDefault", NewString);
    find(handle, "PyUnicode_AsUTF8", Text);
    find(handle, "PyRun_String", Run);
    find(handle, "PyErr_Print", PrintError);
    find(handle, "Py_DecRef", DecRef);
  }

  // The answer of a function of embedded.py. With Python's lock held. Throws Error.
  std::string call(const char* function, const Strings& arguments) const {
    Object* names = NewDict();
    Object* list = NewList(0);
    for (const std::string& argument : arguments) {
      give(NewString(argument.c_str()), [&](Object* text) { Append(list, text); });
    }
    give(list, [&](Object* value) { SetItem(names, "arguments", value); });
    give(NewString(function), [&](Object* value) { SetItem(names, "function", value); });
    constexpr int file_input = 257;  // Py_file_input
    Object* done = Run(call_embedded, file_input, names, names);
    std::string answer, failure = "Python failed";
    if (done) {
      answer = text_of(names, "answer");
      failure = text_of(names, "failure");
      DecRef(done);
    } else {
      PrintError();
    }
    DecRef(names);
    if (!failure.empty()) {
      throw Error("tsfuser: " + failure);
    }
    return answer;
  }

 protected:
  template <typename Function>
  static void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (!function) {
      throw Error(std::string("tsfuser: this Python is of a version that is not known: it has no ") + name);
    }
  }

 private:
  template <typename Use>
  void give(Object* object, Use use) const {
    use(object);
    DecRef(object);
  }

  std::string text_of(Object* names, const char* name) const {
    Object* value = GetItem(names, name);
    const char* text = value ? Text(value) : nullptr;
    return text ? text : "";
  }
};

// And those that start and end it.
struct OwnPython : Python {
  wchar_t* (*DecodeLocale)(const char*, size_t*);
  void (*SetProgramName)(const wchar_t*);
  void (*InitializeEx)(int);
  int (*RunSimple)(const char*, void*);
  int (*FinalizeEx)();
  void (*Free)(void*);

  explicit OwnPython(void* handle) : Python(handle) {
    find(handle, "Py_DecodeLocale", DecodeLocale);
    find(handle, "Py_SetProgramName", SetProgramName);
    find(handle, "Py_InitializeEx", InitializeEx);
    find(handle, "PyRun_SimpleStringFlags", RunSimple);
    find(handle, "Py_FinalizeEx", FinalizeEx);
    find(handle, "PyMem_RawFree", Free);
  }
};

// Python's lock, for this scope.
class Lock {
 public:
  explicit Lock(const Python& python) : python_(python), state_(python.Ensure()) {}
  ~Lock() { python_.Release(state_); }
  Lock(const Lock&) = delete;

 private:
  const Python& python_;
  const int state_;
};

}  // namespace
}  // namespace tsfuser

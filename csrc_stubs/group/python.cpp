#include "group/python.h"

#include "call/counters.h"
#include "group/interrupts.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace tsfuser {
namespace {

struct Door {
  std::atomic<bool> open{true};
  std::atomic<int> inside{0};
  std::mutex mutex;  // of `pending`
  std::vector<PyObject*> pending;
};

// Leaked on purpose: threads may still call groups while the process exits.
Door& door() {
  static Door* d = new Door;
  return *d;
}

}  // namespace

PythonCall::PythonCall() {
  door().inside.fetch_add(1);
  if (door().open.load() && Py_IsInitialized()) {
    gil_.emplace();
    if (!door().open.load()) {  // closed while we waited
      gil_.reset();
    } else {
      counters().add(Count::PythonCalls);
    }
  }
}

PythonCall::~PythonCall() {
  gil_.reset();
  door().inside.fetch_sub(1);
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    released_.emplace();
  }
}

void release_later(PyObject* object) {
  if (object) {
    const std::lock_guard<std::mutex> lock(door().mutex);
    door().pending.push_back(object);
  }
}

void release_now() {
  std::vector<PyObject*> pending;
  {
    const std::lock_guard<std::mutex> lock(door().mutex);
    pending.swap(door().pending);
  }
  for (PyObject* object : pending) {
    Py_DECREF(object);
  }
}

void close_python() {
  door().open.store(false);
  const py::gil_scoped_release released;
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (door().inside.load() > 0 && std::chrono::steady_clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void forget_other_threads() {
  door().inside.store(0);
  new (&door().mutex) std::mutex;
}

namespace {

// "KeyError: 'x'"
std::string text_of(py::error_already_set& error) {
  try {
    const std::string text = py::str(error.value());
    return std::string(py::str(error.type().attr("__name__"))) + (text.empty() ? "" : ": " + text);
  } catch (py::error_already_set&) {
    return "an exception without a text";
  }
}

bool is_out_of_memory(const py::error_already_set& error) {
  const auto torchs = py::module_::import("torch").attr("OutOfMemoryError");
  return error.matches(PyExc_MemoryError) || error.matches(torchs);
}

}  // namespace

void with_callback(const Callback& callback, const char* mistake,
                   const std::function<void(const py::object&)>& use) {
  const PythonCall python;
  if (!python) {
    return;
  }
  HeldInterrupts held;
  release_now();
  const py::object fn = callback.get();
  if (!fn) {
    return;
  }
  try {
    use(fn);
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_Exception) && !is_out_of_memory(error)) {
      throw PassError(text_of(error));
    }
    held.keep(error);
  } catch (const py::cast_error&) {
    throw PassError(mistake);
  }
}

void dispose(py::error_already_set& error, HeldInterrupts& held, const char* where) {
  if (error.matches(PyExc_Exception)) {
    error.discard_as_unraisable(where);
  } else {
    held.keep(error);
  }
}

}  // namespace tsfuser

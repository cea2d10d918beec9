// Access to Python: when it may be called, how its objects are released, and how it is shut down.
//
// Rules. A thread that waits for the GIL holds no lock of this extension, unless every thread that waits
// for that lock has released the GIL before. No Python object is released where it is unknown whether the
// thread holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <optional>
#include <stdexcept>

namespace tsfuser {

namespace py = pybind11;

// The GIL for one call into Python, from any thread. False once the interpreter shuts down: then Python
// must not be touched. Example: `PythonCall python; if (python) fn(1);`
class PythonCall {
 public:
  PythonCall();
  ~PythonCall();
  PythonCall(const PythonCall&) = delete;
  explicit operator bool() const { return gil_.has_value(); }

 private:
  std::optional<py::gil_scoped_acquire> gil_;
};

// Lets go of the GIL if this thread has it.
class WithoutGil {
 public:
  WithoutGil();

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Gives up one reference, at the next `release_now`. Needs no GIL.
void release_later(PyObject* object);
// With the GIL held.
void release_now();

// Called at the interpreter's exit with the GIL held: no call enters Python any more, and those inside get
// some seconds to finish.
void close_python();
// In the child of a fork only the forking thread lives on.
void forget_other_threads();

// A callable that Python may replace at any time; never destroyed by C++.
class Callback {
 public:
  // With the GIL held. Returns what was set before, or None.
  py::object set(py::object fn) {
    PyObject* old = fn_;
    fn_ = fn.is_none() ? nullptr : fn.release().ptr();
    return old ? py::reinterpret_steal<py::object>(old) : py::none();
  }
  py::object get() const { return py::reinterpret_borrow<py::object>(fn_); }

 private:
  PyObject* fn_ = nullptr;
};

// What Python has raised in a pass, as "KeyError: 'x'"; or what was wrong with its result.
class PassError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `use(fn)` with the GIL held, where `callback` is set to fn. Raises a PassError for an exception of fn, and
// one with `mistake` where its result does not cast. Ctrl-C and MemoryError are kept until all has returned,
// and raised in the caller. Example:
//     with_callback(pass_callback(), "no graph came back",
//                   [&](const py::object& pass) { graph = pass(graph).cast<GraphPtr>(); });
void with_callback(const Callback& callback, const char* mistake,
                   const std::function<void(const py::object&)>& use);

class HeldInterrupts;  // interrupts.h

// Disposes of a Python exception that has nobody to go to: what is no `Exception` (SystemExit,
// KeyboardInterrupt) is raised again in the caller, others are written to stderr. With the GIL held.
void dispose(py::error_already_set& error, HeldInterrupts& held, const char* where);

}  // namespace tsfuser

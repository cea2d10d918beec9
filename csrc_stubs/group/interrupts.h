// Ctrl-C while our Python code runs: it is raised only after that code has returned, in the code that
// called the group.
//
// Python raises KeyboardInterrupt between any two bytecodes of its main thread, also inside a `__del__` or
// a callback of the garbage collector, where the exception is lost. So none is raised in our code. SIGINT
// is noted instead. The planner asks `interrupted()` from time to time, and stops early. When its frames
// are gone and the next bytecode is the caller's, the signal is sent again.
#pragma once

#include "group/python.h"

#include <cstdint>

namespace tsfuser {

// SIGINT is held while one of these lives. Create and destroy it with the GIL held. Other threads than
// Python's main one, which KeyboardInterrupt never reaches, learn of the signal as well; then it is also
// passed on at once. Example:
//     HeldInterrupts held;
//     try { planner(); } catch (py::error_already_set& error) { held.keep(error); }
class HeldInterrupts {
 public:
  HeldInterrupts();
  ~HeldInterrupts();
  HeldInterrupts(const HeldInterrupts&) = delete;
  // Raises an exception that is none of ours in the caller, later: SystemExit of a signal handler, say, or
  // the cause of the planner's `Interrupted`.
  void keep(py::error_already_set& error);

 private:
  friend bool interrupted();
  HeldInterrupts* const outer_;
  const bool main_;
  bool tripped_ = false;  // a signal that Python had noted, but not yet raised
  const uint64_t before_;
  py::object exception_;
};

// Whether Ctrl-C was pressed since this thread's innermost HeldInterrupts was made, or just before.
bool interrupted();

// With the GIL held, at the import.
void remember_main_thread(unsigned long thread);
// In the child of a fork the forking thread is the main one.
void interrupts_after_fork();

}  // namespace tsfuser

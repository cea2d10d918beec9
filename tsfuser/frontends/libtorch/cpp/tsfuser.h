// tsfuser for C++ programs: TorchScript modules that are loaded and called after start() run fused.
//
//     #include <tsfuser.h>
//     tsfuser::start();                                // once, before the first call of a module
//     torch::jit::Module module = torch::jit::load("model.pt");
//     ... module.forward(...) ...                      // from any number of threads
//     tsfuser::stop();
//
// Python makes the plan of a graph: start() loads it into the program and lets it go. Calls that have their
// plan never enter Python, and never wait for it. Compile tsfuser.cpp into the program, with the flags that
// `python -m tsfuser config --cflags --libs` prints, or with CMake: find_package(tsfuser) and the target
// tsfuser::tsfuser.
#pragma once

#include <torch/version.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace tsfuser {

// Something is missing, or of another version; what() is a sentence that says what, and what to do. Modules
// run as torch runs them without tsfuser, and start() may be called again.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {
std::string python_of_the_build();  // "python3" where tsfuser.cpp was compiled without the printed flags
}

struct Options {
  // The interpreter of the environment that has torch and tsfuser: a path, or a name in PATH.
  std::string python = detail::python_of_the_build();
  // tsfuser's environment variables, as docs/options.md lists them: {{"TSFUSER_CACHE_DIR", "/var/cache"}}.
  // They are set in the environment of the process, so call start() before other threads read that.
  std::map<std::string, std::string> variables;
};

namespace detail {
void start(const Options& options, const char* compiled_with);
}

// Switches fusion on, as `tsfuser.enable()` in Python. Takes the seconds that `import torch` takes. Leaves
// all signals as they are. A Python that the program has started already is used, and not stopped by stop():
// then `python` is not looked at. Does nothing while fusion is on. Throws Error.
inline void start(const Options& options = {}) { detail::start(options, TORCH_VERSION); }

// What has happened since start(): the names of `tsfuser.stats()`, and of each reason why calls ran unfused
// as "fallbacks: REASON". `python_calls` is how often C++ has entered Python. This call enters it, too, so
// it waits while Python holds its lock. Empty before start() and after stop().
std::map<std::string, int64_t> stats();

// Fuses nothing new, waits for threads that make a plan, and ends Python where start() has started it. Calls
// that have their plan run fused as before, others unfused. The end of the process does the same. Python
// cannot be started a second time: start() throws Error then.
void stop();

}  // namespace tsfuser

// What happens where a pass of ours raises. Torch calls passes while it makes a program or runs it, and the
// program is to go on with the graph as it was before the pass. So the caller of a pass keeps that graph:
//
//     const GraphSnapshot before(graph);
//     try { rewrite(graph); } catch (...) { before.restore(); pass_failed("rewrite", graph); }
//
// Python warns of each failure once, and counts all (tsfuser/planning/failures.py). Three things reach the
// program nevertheless: out of memory; Ctrl-C, and what signal handlers raise (interrupts.h); and all
// failures where the fallback is disabled. So does the end of a thread (pthread_exit).
#pragma once

#include "group/python.h"

#include <string>
#include <vector>

namespace torch::jit {
struct Graph;
}

namespace tsfuser {

// For `catch (...)`, once all is as it was: reports that the pass has raised, with a line of the graph's
// program. Raises the exception again if it has to reach the program.
void pass_failed(const char* name, const torch::jit::Graph& graph);

// Runs a pass that changes nothing before it succeeds. Whether it did.
template <class Pass>
bool attempt(const char* name, const torch::jit::Graph& graph, const Pass& pass) {
  try {
    pass();
    return true;
  } catch (...) {
    pass_failed(name, graph);
    return false;
  }
}

// The end of a pass, where tests may have it raise.
void end_of_pass(const char* name);
// The pass of that name raises at its end; none does where the name is empty. Returns the name before.
std::string fail_pass(std::string name);

// Told (name of the pass, exception as text, line of the program).
Callback& failure_callback();

}  // namespace tsfuser

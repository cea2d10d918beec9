// What `import` hooks into torch's TorchScript executor, and the switches that Python sets.
#pragma once

#include "python.h"

#include <atomic>
#include <string>
#include <vector>

namespace tsfuser {

extern std::atomic<bool> pass_enabled;
extern std::atomic<bool> guard_mode;

Callback& pass_callback();
Callback& planner_callback();
Callback& reporter_callback();

// Once a process, when the module is initialised. None of them changes a program while `pass_enabled` is off.
void register_operators();   // operators.cpp
void register_guard();       // guard.cpp
void register_pass_hooks();  // pass_hook.cpp

// Nodes of these kinds get the types of their tensors profiled. Additive.
void profile_kinds(const std::vector<std::string>& kinds);

}  // namespace tsfuser

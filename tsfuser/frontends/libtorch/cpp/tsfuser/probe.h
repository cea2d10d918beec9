// Asks an interpreter, as a program of its own, which library to load. Only tsfuser.cpp includes this file.
//
// In: the path of an interpreter, and the torch that the program was compiled with. Out: the interpreter and
// its library, or an Error that says why tsfuser cannot work there.
#pragma once

#include "python.h"

#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

extern char** environ;

namespace tsfuser {
namespace {

constexpr const char* from_command_line = R"(
import sys
sys.path[:1] = []  # the working directory, where no embedded Python looks
function, *arguments = sys.argv[1:]
)";
constexpr const char* to_standard_output = R"(
print("failed\n" + failure if failure else "done\n" + answer)
)";

// The file that the program has loaded libtorch_cpu.so from; "" where it has loaded none.
std::string loaded_libtorch() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const std::string name = info->dlpi_name;
        const std::string wanted = "/libtorch_cpu.so";
        const bool same = name.size() > wanted.size() &&
                          name.compare(name.size() - wanted.size(), wanted.size(), wanted) == 0;
        if (same) {
          *static_cast<std::string*>(found) = name;
        }
        return static_cast<int>(same);
      },
      &path);
  return path;
}

std::string read_all(int file) {
  std::string text;
  char buffer[4096];
  ssize_t count = 0;
  while ((count = read(file, buffer, sizeof buffer)) > 0 || (count < 0 && errno == EINTR)) {
    text.append(buffer, count > 0 ? static_cast<size_t>(count) : 0);
  }
  return text;
}

// What a program writes on its standard output; no shell is needed. Throws Error where it does not run.
std::string output_of(const Strings& command) {
  std::vector<char*> words;
  for (const std::string& word : command) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(std::string("tsfuser: no pipe can be made: ") + std::strerror(errno));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, words[0], &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  const std::string text = failed ? "" : read_all(ends[0]);
  close(ends[0]);
  if (failed) {
    throw Error("tsfuser finds no Python: \"" + command[0] + "\" does not run (" + std::strerror(failed) +
                "); Options::python names the interpreter of the environment that has torch and tsfuser");
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return text;
}

// Two lines of embedded.probe: the interpreter, and its library. Throws Error.
std::pair<std::string, std::string> probe(const std::string& python, const char* compiled_with) {
  const std::string code = std::string(from_command_line) + call_embedded + to_standard_output;
  const std::string text = output_of({python, "-c", code, "probe", compiled_with, loaded_libtorch()});
  const size_t first = text.find('\n'), second = text.find('\n', first + 1);
  const std::string kind = text.substr(0, first);
  if (first == std::string::npos || second == std::string::npos || (kind != "done" && kind != "failed")) {
    throw Error("tsfuser finds no Python: \"" + python + "\" is no Python that runs");
  }
  const std::string rest = text.substr(first + 1, text.size() - first - 2);
  if (kind == "failed") {
    throw Error("tsfuser: " + rest);
  }
  const size_t middle = rest.find('\n');
  return {rest.substr(0, middle), rest.substr(middle + 1)};
}

}  // namespace
}  // namespace tsfuser

// A start and a stop, built with the flags that `python -m tsfuser config` prints.
#include <tsfuser.h>

#include <cstdio>

int main() {
  try {
    tsfuser::start();
    tsfuser::stop();
  } catch (const tsfuser::Error& error) {
    std::printf("%s\n", error.what());
  }
  std::printf("end of main\n");
}

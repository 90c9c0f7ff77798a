// What a user of the installed library writes first: load a checkpoint and say what it is.
#include <cstdio>

#include "penstock/core/error.h"
#include "penstock/core/version.h"
#include "penstock/model/checkpoint.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: consumer MODEL\n");
    return 2;
  }
  try {
    const penstock::Checkpoint checkpoint(argv[1]);
    std::printf("penstock %.*s: %lld layers, hidden %lld\n",
                static_cast<int>(penstock::version().size()), penstock::version().data(),
                static_cast<long long>(checkpoint.config().layers),
                static_cast<long long>(checkpoint.config().hidden));
  } catch (const penstock::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

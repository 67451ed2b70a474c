// One kernel file as a shared library. KERNEL_FILE names it, ENTRIES holds EXPORT(...) for each of its kernels, ASSERTIONS
// static assertions of the tests.
#include <stddef.h>

#include "shim.h"

// Without a name, so that the libraries of several variants can be loaded together.
namespace {
#include KERNEL_FILE
}

template <class Params>
struct Call {
  void (*kernel)(Params);
  const Params* params;
};

template <class Params>
static const char* run(void (*kernel)(Params), const void* params, uint3 grid, uint3 block, unsigned shared,
                       unsigned order_seed) {
  const Call<Params> call{kernel, static_cast<const Params*>(params)};
  const auto thread = [](const void* context) {
    const auto* c = static_cast<const Call<Params>*>(context);
    c->kernel(*c->params);
  };
  return shim::run_grid(shim::Body{thread, &call}, grid, block, shared, order_seed);
}

#define VISIBLE extern "C" __attribute__((visibility("default")))

#define EXPORT(entry)                                                                                             \
  VISIBLE const char* run_##entry(const void* params, unsigned grid_x, unsigned grid_y, unsigned grid_z,          \
                                  unsigned block_x, unsigned block_y, unsigned shared, unsigned order_seed) {     \
    return run(entry, params, uint3{grid_x, grid_y, grid_z}, uint3{block_x, block_y, 1}, shared, order_seed);     \
  }
ENTRIES

#ifdef ASSERTIONS
ASSERTIONS
#endif

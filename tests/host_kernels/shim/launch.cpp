#include "block.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

uint3 threadIdx, blockIdx, blockDim, gridDim;

// The linker's names for the ends of the section; absent where a kernel has no shared memory.
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace shim {

namespace {

constexpr unsigned kMaxThreads = 1024;

std::unique_ptr<char[]> dynamic;  // just as large as asked for, so that AddressSanitizer sees its end

// All ones is NaN in every floating-point type. Byte by byte and unchecked: under AddressSanitizer the section holds
// red zones too.
__attribute__((no_sanitize("address", "thread"))) void poison_shared_memory(unsigned dynamic_size) {
  std::memset(dynamic.get(), 0xFF, dynamic_size);
  for (volatile char* p = __start_shared_memory; p != __stop_shared_memory; ++p) *p = static_cast<char>(0xFF);
}

std::string name(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

}  // namespace

std::string describe(const Place& place) {
  const char* slash = std::strrchr(place.file, '/');
  return "thread " + name(thread_at(place.thread)) + " waits at " + (slash ? slash + 1 : place.file) + ":" +
         std::to_string(place.line);
}

std::vector<unsigned> Order::of(unsigned count) {
  std::vector<unsigned> indices(count);
  std::iota(indices.begin(), indices.end(), 0u);
  if (seed_ == 1) std::reverse(indices.begin(), indices.end());
  if (seed_ > 1) std::shuffle(indices.begin(), indices.end(), random_);
  return indices;
}

uint3 thread_at(unsigned index) { return uint3{index % blockDim.x, index / blockDim.x, 0}; }

std::string check_barrier(const std::vector<Place>& waiting) {
  for (const Place& other : waiting) {
    const Place& first = waiting.front();
    if (other.line != first.line || std::strcmp(other.file, first.file) != 0) {
      return "divergent barrier: " + describe(first) + ", " + describe(other);
    }
  }
  return "";
}

void* dynamic_shared() { return dynamic.get(); }

const char* run_grid(Body body, uint3 grid, uint3 block, unsigned shared, unsigned order_seed) {
  static std::string error;
  gridDim = grid;
  blockDim = block;
  const unsigned threads = block.x * block.y, blocks = grid.x * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || blocks == 0) return "invalid grid or block";
  dynamic.reset(new char[shared]);
  Order order(order_seed);
  error.clear();
  for (const unsigned i : order.of(blocks)) {
    blockIdx = uint3{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    poison_shared_memory(shared);
    error = run_block(body, order);
    if (!error.empty()) {
      error = "block " + name(blockIdx) + ": " + error;
      break;
    }
  }
  end_grid();
  return error.empty() ? nullptr : error.c_str();
}

}  // namespace shim

// A block's threads as threads of the process, for ThreadSanitizer. Their order is the system's.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "block.h"

namespace shim {

namespace {

struct Divergent {};  // unwinds a thread after a complaint

std::mutex mutex;
std::condition_variable released;
unsigned running;         // threads that have not returned
unsigned barriers;        // passed so far
std::vector<Place> waiting;
std::string error;

// Opens the barrier once every thread that has not returned is there. Call it with the mutex held.
void open_if_complete() {
  if (waiting.size() != running) return;
  if (error.empty()) error = check_barrier(waiting);
  waiting.clear();
  ++barriers;
  released.notify_all();
}

void thread_main(Body body, unsigned index) {
  threadIdx = thread_at(index);
  try {
    body();
  } catch (const Divergent&) {
  }
  const std::lock_guard<std::mutex> lock(mutex);
  --running;
  open_if_complete();
}

}  // namespace

void sync_threads(const char* file, int line) {
  std::unique_lock<std::mutex> lock(mutex);
  waiting.push_back(Place{threadIdx.y * blockDim.x + threadIdx.x, file, line});
  const unsigned mine = barriers;
  open_if_complete();
  released.wait(lock, [&] { return barriers != mine; });
  if (!error.empty()) throw Divergent{};
}

std::string run_block(Body body, Order& order) {
  running = blockDim.x * blockDim.y;
  error.clear();
  std::vector<std::thread> threads;
  for (const unsigned i : order.of(running)) threads.emplace_back([body, i] { thread_main(body, i); });
  for (std::thread& thread : threads) thread.join();
  return error;
}

}  // namespace shim

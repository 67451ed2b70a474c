// A block's threads as threads of the process, for ThreadSanitizer. Their order is the system's.
#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "block.h"

namespace shim {

namespace {

struct Divergent {};  // unwinds a thread after a complaint

// The barrier of the block.
std::mutex mutex;
std::condition_variable released;
unsigned running;   // threads that have not returned
unsigned barriers;  // passed so far
std::vector<Place> waiting;
std::string error;

// A warp with a lock of its own: an exchange orders the memory of its warp alone, so that a missing barrier between
// warps still shows as a race.
struct Room {
  std::mutex mutex;
  std::condition_variable moved;
  Warp warp;
  bool failed = false;
};

std::array<Room, 1024 / kWarp> rooms;

Room& room_of(unsigned thread) { return rooms[thread / kWarp]; }

// Makes every thread of the block give up that waits for others. Call it without any lock.
void fail(const std::string& complaint) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = complaint;
    released.notify_all();
  }
  for (Room& room : rooms) {
    const std::lock_guard<std::mutex> lock(room.mutex);
    room.failed = true;
    room.moved.notify_all();
  }
}

// Changes what the warp knows of a thread, and lets go on whoever can.
template <class Change>
void change(unsigned thread, Change make) {
  Room& room = room_of(thread);
  std::string complaint;
  {
    const std::lock_guard<std::mutex> lock(room.mutex);
    make(room.warp.lanes[thread % kWarp]);
    if (room.warp.settle()) room.moved.notify_all();
    complaint = room.warp.check();
  }
  if (!complaint.empty()) fail(complaint);
}

// Opens the barrier once every thread that has not returned is there. Call it with the block's mutex held.
void open_if_complete() {
  if (waiting.size() != running) return;
  if (error.empty()) error = check_barrier(waiting);
  waiting.clear();
  ++barriers;
  for (Room& room : rooms) {
    const std::lock_guard<std::mutex> lock(room.mutex);
    room.warp.open_barrier();
  }
  released.notify_all();
}

void thread_main(Body body, unsigned index) {
  threadIdx = thread_at(index);
  try {
    body();
  } catch (const Divergent&) {
  }
  change(index, [](Lane& lane) { lane.state = Lane::kReturned; });
  const std::lock_guard<std::mutex> lock(mutex);
  --running;
  open_if_complete();
}

}  // namespace

void sync_threads(const char* file, int line) {
  const Place place{thread_index(), file, line};
  change(place.thread, [&](Lane& lane) { lane.wait_at_barrier(place); });
  std::unique_lock<std::mutex> lock(mutex);
  waiting.push_back(place);
  const unsigned mine = barriers;
  open_if_complete();
  released.wait(lock, [&] { return barriers != mine || !error.empty(); });
  if (!error.empty()) throw Divergent{};
}

unsigned exchange(const char* file, int line, unsigned mask, unsigned source, unsigned bits) {
  const Place place{thread_index(), file, line};
  change(place.thread, [&](Lane& lane) { lane.exchange(place, mask, source, bits); });
  Room& room = room_of(place.thread);
  const Lane& lane = room.warp.lanes[place.thread % kWarp];
  std::unique_lock<std::mutex> lock(room.mutex);
  room.moved.wait(lock, [&] { return lane.state == Lane::kRunning || room.failed; });
  if (room.failed) throw Divergent{};
  return lane.bits;
}

std::string run_block(Body body, Order& order) {
  running = blockDim.x * blockDim.y;
  waiting.clear();
  error.clear();
  for (Room& room : rooms) {
    room.warp = Warp{};
    room.failed = false;
  }
  for (unsigned i = 0; i < running; ++i) room_of(i).warp.lanes[i % kWarp].state = Lane::kRunning;
  std::vector<std::thread> threads;
  for (const unsigned i : order.of(running)) threads.emplace_back([body, i] { thread_main(body, i); });
  for (std::thread& thread : threads) thread.join();
  return error;
}

}  // namespace shim

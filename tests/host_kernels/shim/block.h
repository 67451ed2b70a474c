// Running one block. fibers.cpp and threads.cpp hold the two ways to do it.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "launch.h"

namespace shim {

// The order in which blocks, and threads between two barriers, take their turns.
class Order {
 public:
  // 0 is forward, 1 reverse; anything else seeds a shuffle that differs every time.
  explicit Order(unsigned seed) : seed_(seed), random_(seed) {}

  std::vector<unsigned> of(unsigned count);

 private:
  unsigned seed_;
  std::mt19937 random_;
};

// Runs the threads of one block. Says what is wrong, or nothing.
std::string run_block(Body body, Order& order);

uint3 thread_at(unsigned index);

// Where a thread waits.
struct Place {
  unsigned thread;
  const char* file;
  int line;
};

// Complains where threads wait at different barriers, or returns the empty string.
//
// Threads that have returned count as arrived, as they do since compute capability 7.0.
std::string check_barrier(const std::vector<Place>& waiting);

}  // namespace shim

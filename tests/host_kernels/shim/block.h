// Running one block, its threads being fibers of one thread.
#pragma once

#include <array>
#include <random>
#include <string>
#include <vector>

#include "launch.h"

namespace shim {

// The order in which blocks, warps between two barriers, and lanes between two exchanges take their turns.
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

// Ends what ThreadSanitizer takes for threads, of which it allows some thousands at a time.
void end_grid();

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

// "thread (1, 0, 0) waits at loss.cu:12"
std::string describe(const Place& place);

// A thread as its warp sees it.
struct Lane {
  enum State { kRunning, kExchanging, kAtBarrier, kReturned };

  State state = kReturned;  // as lanes beyond the block's last thread are
  Place place{};            // where it waits
  int barrier = 0;          // the number of the barrier that it waits at; 0 is that of the whole block
  unsigned mask = 0;        // of the exchange: whom it waits for, whose bits it reads, what it hands over
  unsigned source = 0;
  unsigned bits = 0;  // then what it has read

  // For ThreadSanitizer: a place for every other exchange of this lane, so that it may go on to the next before the
  // others have left this one; the lanes of the last complete exchange, and which of them were at an odd one.
  char places[2]{};
  unsigned exchanges = 0;
  unsigned group = 0;
  unsigned odd = 0;

  unsigned gathers = 0;  // gatherings of the whole warp that this lane has come to

  void exchange(Place at, unsigned mask_, unsigned source_, unsigned bits_);
  void wait_at_barrier(Place at, int number = 0);
};

// The lanes of a warp and the exchanges between them.
struct Warp {
  std::array<Lane, kWarp> lanes;

  // What the lanes lay down for all to read, in turn in two places: a lane may be at the next gathering before the others
  // have read what was laid down for the last one, but not at the one after that.
  std::array<Gathered, 2> gathered;

  // Lets those go on whose exchange is complete: all lanes of its mask that have not returned are there, at the same
  // place and with the same mask. Says whether there were any.
  bool settle();

  // Complains where nobody can go on any more and not all wait at a barrier, or returns the empty string.
  std::string check() const;

  // Lets those go on that wait at a barrier.
  void open_barrier(int number = 0);

  bool is_running() const { return in_state(Lane::kRunning) != 0; }

 private:
  unsigned in_state(Lane::State state) const;
  unsigned together_with(const Lane& lane) const;
  void complete(unsigned group);
};

unsigned warps_of_block();

}  // namespace shim
